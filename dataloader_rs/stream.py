"""Datasets without an index: they are iterated, and their end is seen when it is there."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from dataloader_rs.errors import shown, type_name
from dataloader_rs.foreign import is_foreign_stream
from dataloader_rs.hints import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from dataloader_rs.protocols import SupportsIter

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class PyIterableDataset(Generic[T_co]):
    """Base class of datasets that are streams: subclass it and implement ``__iter__``.

    A subclass may have a ``__len__``, which the loader then counts its batches by, and ``shards(num_shards)``, which
    returns that many iterables that together give each sample once: with more than one worker each of them then reads a
    shard of its own, and batches are read from the shards in turns.

    Notes
    -----
    *Thread safety.* ``iter(dataset)`` is called once for each epoch, by the thread that starts it. All workers read
    from that one iterator, or from one of the shards each, and one of them at a time: it needs no lock. Samples come in
    the order of the stream, and ``next`` is not called again after the end.

    Examples
    --------
    >>> from dataloader_rs import PyDataloader
    >>> class Countdown(PyIterableDataset[int]):
    ...     def __iter__(self):
    ...         yield from (3, 2, 1)
    >>> list(PyDataloader(Countdown(), batch_size=2, num_workers=2))
    [[3, 2], [1]]
    """

    def __iter__(self) -> Iterator[T_co]:
        raise NotImplementedError(f"{type_name(self)} must implement __iter__")

    @staticmethod
    def of(source: SupportsIter[T]) -> PyIterableDataset[T]:
        """Adapt any iterable.

        Parameters
        ----------
        source : iterable
            A stream of another library, for example. A `PyIterableDataset` is returned as it is.

        Returns
        -------
        PyIterableDataset
            Iterates `source`; has a ``__len__`` that works if `source` has one.

        Raises
        ------
        TypeError
            If it is no iterable.

        Examples
        --------
        >>> list(PyIterableDataset.of("abc"))
        ['a', 'b', 'c']
        """
        if isinstance(source, PyIterableDataset):
            return source
        if getattr(type(source), "__iter__", None) is None:
            raise TypeError(f"source must be iterable, got {shown(source)} ({type_name(source)})")
        return _Adapter(source)


class _Adapter(PyIterableDataset[T_co]):
    """An iterable that is no PyIterableDataset, in the clothes of one."""

    def __init__(self, source: SupportsIter[T_co]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[T_co]:
        return iter(self.source)

    def __len__(self) -> int:
        source: Any = self.source
        return len(source)

    def __repr__(self) -> str:
        return f"PyIterableDataset.of({self.source!r})"


def is_stream(dataset: object) -> bool:
    """Whether `dataset` is iterated rather than asked by index."""
    return isinstance(dataset, PyIterableDataset) or is_foreign_stream(dataset)


def readers_of(dataset: Any, num_workers: int) -> list[Iterator[Any]]:
    """The iterators that the workers of one epoch read: one for all, or one for each.

    Raises
    ------
    Exception
        What the dataset raises; a ValueError if it has not as many shards as it was asked for.
    """
    if num_workers < 2 or not _has_shards(dataset):
        return [iter(dataset)]
    most = 2 * num_workers + 1000  # so that shards without end are an error, too
    shards = list(islice(dataset.shards(num_workers), most))
    if len(shards) != num_workers:
        raise ValueError(f"{type_name(dataset)}.shards({num_workers}) must return {num_workers} iterables, "
                         f"got {'at least ' if len(shards) == most else ''}{len(shards)}")
    return [iter(shard) for shard in shards]


def _has_shards(dataset: object) -> bool:
    return isinstance(dataset, PyIterableDataset) and getattr(type(dataset), "shards", None) is not None


class LengthCheck:
    """Warns once for a stream that gives another number of samples than its ``__len__`` says.

    Parameters
    ----------
    dataset : object
    """

    def __init__(self, dataset: object) -> None:
        self._name = type_name(dataset)
        self._has_warned = False

    def check(self, expected: int | None, num_read: int) -> None:
        """Compare what an epoch has read, to its end, with what was expected."""
        if expected is None or expected == num_read or self._has_warned:
            return
        self._has_warned = True
        import warnings

        warnings.warn(f"len({self._name}) is {expected}, but it gave {num_read} samples: all of them were delivered",
                      RuntimeWarning, stacklevel=2)
