"""The epoch that workers go on with while the consumer finishes the one before it. Knows neither threads nor orders."""

from __future__ import annotations

from collections.abc import Callable

from dataloader_rs._core import PyDataloaderIter, WorkerPool
from dataloader_rs.hints import Any, TypeAlias
from dataloader_rs.locks import ForkSafeLock

# start(take_epoch, after) starts an epoch, perhaps after another one, and calls `take_epoch` once. It returns the
# iterator of the epoch and its number.
Start: TypeAlias = "Callable[[Callable[[], int], PyDataloaderIter[Any] | None], tuple[PyDataloaderIter[Any], int]]"


class Prepared:
    """An epoch that nobody iterates yet; `length` is that of the dataset or the sampler then."""

    def __init__(self, iterator: PyDataloaderIter[Any], pool: WorkerPool, epoch: int, length: int | None) -> None:
        self.iterator = iterator
        self.pool = pool
        self.epoch = epoch
        self.length = length


class EpochAhead:
    """At most one epoch that is prepared, for the next ``iter(loader)``.

    Notes
    -----
    *Thread safety.* Any thread may call. One at a time takes an epoch and prepares the next, so that none gets lost.
    """

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        # Guarded by `_lock`.
        self._prepared: Prepared | None = None
        self._unused: int | None = None  # number of an epoch that was dropped, for the one in its place

    def discard(self, then: Callable[[], None]) -> None:
        """Drop what was prepared, and its number, because epochs are counted anew; call `then`, all in one step."""
        with self._lock.here():
            self._prepared = self._unused = None
            then()

    def release(self) -> None:
        """Drop what was prepared, but for its number."""
        with self._lock.here():
            if self._prepared is not None:
                self._unused, self._prepared = self._prepared.epoch, None

    def next(self, pool: WorkerPool, length: int | None, take_epoch: Callable[[], int],
             start: Start) -> PyDataloaderIter[Any]:
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
        """
        with self._lock.here():
            if self._prepared is not None and self._prepared.pool is pool and self._prepared.length == length:
                iterator, epoch = self._prepared.iterator, self._prepared.epoch
                self._prepared = None
            else:
                self.release()
                iterator, epoch = self._begin(take_epoch, start, None)
            try:
                following, number = self._begin(take_epoch, start, iterator)
            except Exception:
                return iterator  # it comes again, from the iter() that it belongs to
            except BaseException:
                self._prepared = Prepared(iterator, pool, epoch, length)
                raise
            self._prepared = Prepared(following, pool, number, length)
            return iterator

    def _begin(self, take_epoch: Callable[[], int], start: Start,
               after: PyDataloaderIter[Any] | None) -> tuple[PyDataloaderIter[Any], int]:
        taken: list[int] = []

        def take_unused_first() -> int:
            number, self._unused = self._unused, None
            taken.append(take_epoch() if number is None else number)
            return taken[0]

        try:
            return start(take_unused_first, after)
        except BaseException:
            if taken:
                self._unused = taken[0]
            raise
