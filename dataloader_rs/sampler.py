"""The order of the indices: the user's own iterable, read and checked. Knows neither threads nor the dataset.

NOTE [ errors and frames ] The traceback of an exception leads to the frames that it came through and to those that
called them, with their variables: to the loader, its iterator and the caller's. So who hands an exception on forgets
it. A frame or an object among these that still held it would close a cycle, in which the loader and its threads would
wait for the garbage collector.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Iterator
from itertools import islice

from dataloader_rs.errors import shown, type_name
from dataloader_rs.foreign import is_instance_of
from dataloader_rs.hints import Any, TypeAlias

# A sampler is read this far when an epoch starts, or as far as its length says, and on demand beyond.
READ_AHEAD = 65_536

END = object()

# In 8 bytes an index, or as a list if some index is larger than that.
Indices: TypeAlias = "array[int] | list[int]"


def read_all(sampler: Iterable[Any], name: str = "sampler", place: str = "") -> Indices:
    """All indices of a sampler, checked. Ctrl-C ends a read that does not end.

    `name` and `place` are for messages: what yields the indices, and where in an epoch.
    """
    indices: Indices = array("q")
    iterator = iter(sampler)
    ended = False
    while not ended:
        chunk, error = _read(iterator, READ_AHEAD, len(indices), name, place)
        if error is not None:
            try:
                raise error
            finally:
                del error  # see NOTE [ errors and frames ]
        indices = _joined(indices, chunk)
        ended = len(chunk) < READ_AHEAD
    return indices


class IndexStream:
    """The indices of a sampler, cut into batches; those beyond what is read at the start as they are needed.

    Parameters
    ----------
    sampler : iterable of int
    batch_size : int
        1 or more.
    drop_last : bool
        Whether a last batch that is smaller is left out.
    length : int
        How many indices there are said to be: so many are read at the start, and one more to see the end.

    Attributes
    ----------
    head : array('q') or list of int
        What was read at the start: whole batches, or, if `ended`, all batches.
    ended : bool
        Whether no further batch comes.
    is_empty : bool
        Whether the sampler yields nothing at all.
    error : BaseException or None
        What ended it instead of the end of the sampler. It belongs after the batches drawn so far.

    Raises
    ------
    Exception
        What the sampler raises at the start, TypeError or ValueError for an index that is none.
    """

    def __init__(self, sampler: Iterable[Any], batch_size: int, drop_last: bool, length: int = 0) -> None:
        self._iterator = iter(sampler)
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._position = 0
        self._rest: Indices = array("q")
        self.ended: bool = False
        self.error: BaseException | None = None
        self._read(max(READ_AHEAD, length + 1))
        if self.error is not None:
            error, self.error = self.error, None
            try:
                raise error
            finally:
                del error  # see NOTE [ errors and frames ]
        whole = len(self._rest)
        if not self.ended or drop_last:
            whole -= whole % batch_size
        self.is_empty: bool = self.ended and self._position == 0
        # Cut in place: a copy of many indices takes its time, and as much memory again.
        self.head: Indices = self._rest
        self._rest = self.head[whole:]
        del self.head[whole:]

    def draw(self) -> list[list[int]]:
        """Read one batch's worth of indices more, and return the batches that are whole now, or last."""
        if self.ended:
            return []
        self._read(self._batch_size)
        size = self._batch_size
        indices = list(self._rest)
        whole = len(indices) - len(indices) % size
        batches = [indices[start:start + size] for start in range(0, whole, size)]
        if not self.ended:
            self._rest = self._rest[whole:]
        elif whole < len(indices) and not self._drop_last and self.error is None:
            batches.append(indices[whole:])
        return batches

    def _read(self, count: int) -> None:
        while count > 0 and not self.ended:
            piece = min(count, READ_AHEAD)
            chunk, self.error = _read(self._iterator, piece, self._position)
            self.ended = len(chunk) < piece
            self._position += len(chunk)
            self._rest = _joined(self._rest, chunk)
            count -= len(chunk)


class BatchStream:
    """The batches of a batch sampler, drawn one at a time, and copied.

    Parameters
    ----------
    batch_sampler : iterable of iterables of int
    is_expected : bool
        Whether an epoch without a batch is worth a warning.

    Attributes
    ----------
    ended : bool
        Whether no further batch comes.
    error : None
        What `draw` raises is the end, too.
    """

    error = None

    def __init__(self, batch_sampler: Iterable[Iterable[int]], is_expected: bool) -> None:
        self._batches = iter(batch_sampler)
        self._sampler = batch_sampler
        self._num_drawn = 0
        self._is_expected = is_expected
        self.ended: bool = False

    def draw(self) -> list[list[int]]:
        """One batch more, in a list, which is empty at the end.

        Raises
        ------
        Exception
            What the sampler or a batch raises (a StopIteration of a batch is not the end), a TypeError for a batch that
            is no iterable or an index that is no integer, a ValueError for a negative one.
        """
        batch = next(self._batches, END)
        if batch is not END:
            indices = list(self._read_batch(batch))
            self._num_drawn += 1
            return [indices]
        self.ended = True
        if self._is_expected and self._num_drawn == 0:
            warn_of_nothing("batch_sampler", self._sampler, stacklevel=3)
        return []

    def _read_batch(self, batch: Any) -> Indices:
        if not is_iterable(batch):
            raise TypeError(f"batch_sampler must yield iterables of indices, got {shown(batch)} "
                            f"({type_name(batch)}) as batch {self._num_drawn}")
        return read_all(batch, "batch_sampler", f" of batch {self._num_drawn}")


# By the type: an object may call itself an instance of anything, and the metaclass of a class that cannot be hashed
# breaks isinstance() with an abstract class.


def is_iterable(value: object) -> bool:
    kind = type(value)
    # NumPy's numbers have a __getitem__, which refuses everything.
    return getattr(kind, "__iter__", None) is not None or (
        hasattr(kind, "__getitem__") and not is_instance_of(value, "numpy", "generic"))


def is_iterator(value: object) -> bool:
    return hasattr(type(value), "__next__") and hasattr(type(value), "__iter__")


def warn_of_nothing(name: str, sampler: object, stacklevel: int) -> None:
    """Warn that an epoch is empty. `stacklevel` counts from here."""
    import warnings

    warnings.warn(f"{name} {shown(sampler)} yields nothing, as an iterator does that an earlier epoch has used up: "
                  f"this epoch is empty", RuntimeWarning, stacklevel=stacklevel)


def _read(iterator: Iterator[Any], count: int, position: int, name: str = "sampler",
          place: str = "") -> tuple[Indices, BaseException | None]:
    """Up to `count` indices, the first of which is number `position` of the epoch, and what ended them early.

    What was drawn before an error is kept. A StopIteration that is not the end of the iterator counts as an error.
    """
    indices: Indices
    values: list[Any] = []
    error: BaseException | None = None
    try:
        values.extend(islice(iterator, count))
    except BaseException as raised:
        error = raised
    wrong: BaseException | None = None
    try:
        try:
            indices = array("q", values)
        except Exception:
            # Too large for an array, or no index: one by one, it shows which.
            indices, wrong = _read_one_by_one(values, position, name, place)
            return indices, error if wrong is None else wrong
        if indices and min(indices) < 0:
            first = next(i for i, index in enumerate(indices) if index < 0)
            return indices[:first], _negative(indices[first], position + first, name, place)
        return indices, error
    finally:
        error = wrong = None  # see NOTE [ errors and frames ]


def _read_one_by_one(values: list[Any], position: int, name: str, place: str) -> tuple[Indices, BaseException | None]:
    indices: list[int] = []
    try:
        for value in values:
            indices.append(_checked(value, position + len(indices), name, place))
    except BaseException as raised:
        return indices, raised
    return indices, None


def _checked(value: Any, position: int, name: str, place: str) -> int:
    try:
        index = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must yield integers, got {shown(value)} ({type_name(value)}) "
                        f"at position {position}{place}") from None
    if index < 0:
        raise _negative(index, position, name, place)
    return index


def _negative(index: int, position: int, name: str, place: str) -> ValueError:
    return ValueError(f"{name} must yield indices >= 0, got {shown(index)} at position {position}{place}")


def _joined(first: Indices, second: Indices) -> Indices:
    if type(first) is type(second):
        same: Any = second
        first += same
        return first
    return [*first, *second]
