"""The epoch that workers go on with while the consumer finishes the one before it. Knows neither threads nor orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dataloader_rs._core import PyDataloaderIter, WorkerPool
from dataloader_rs.locks import ForkSafeLock


class Prepared(NamedTuple):
    """An epoch that nobody iterates yet."""

    iterator: PyDataloaderIter
    pool: WorkerPool
    epoch: int
    length: int | None  # of the dataset or the sampler then


class EpochAhead:
    """At most one epoch that is prepared, for the next ``iter(loader)``.

    Notes
    -----
    *Thread safety.* Any thread may call. One at a time takes an epoch and prepares the next, so that none gets lost.
    """

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._prepared: Prepared | None = None

    def discard(self) -> None:
        """Drop what was prepared, because the data changes."""
        with self._lock.here():
            self._prepared = None

    def next(self, pool: WorkerPool, length: int | None, take_epoch: Callable[[], int],
             start: Callable[[Callable[[], int], PyDataloaderIter | None], tuple[PyDataloaderIter, int]]
             ) -> PyDataloaderIter:
        """The iterator of the next epoch; the one after it is prepared.

        Parameters
        ----------
        pool : WorkerPool
            The one of the loader. What was prepared on another is dropped.
        length : int or None
            Of the dataset or the sampler. What was prepared for another length is dropped.
        take_epoch : callable
            Returns the number of the next epoch.
        start : callable
            ``start(take_epoch, after) -> iterator, number of the epoch``, which calls `take_epoch` once it cannot fail
            any more.
        """
        with self._lock.here():
            prepared, self._prepared = self._prepared, None
            if prepared is not None and prepared.pool is pool and prepared.length == length:
                iterator = prepared.iterator
            else:
                # An epoch that is dropped gives its number to the one in its place.
                number = None if prepared is None else prepared.epoch
                prepared = None
                iterator, _ = start(take_epoch if number is None else lambda: number, None)
            try:
                following, epoch = start(take_epoch, iterator)
            except Exception:
                return iterator  # it comes again, from the iter() that it belongs to
            self._prepared = Prepared(following, pool, epoch, length)
            return iterator
