"""The order of the indices: the user's own iterable, read and checked. Knows neither threads nor the dataset."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Iterator
from itertools import islice

from dataloader_rs.errors import shown

# A sampler without a length is read this far when an epoch starts, and on demand beyond.
READ_AHEAD = 65_536


def read_all(sampler: Iterable) -> array | list[int]:
    """All indices of a sampler, checked. Ctrl-C ends a read that does not end."""
    indices: array | list[int] = array("q")
    iterator = iter(sampler)
    while len(chunk := _read(iterator, READ_AHEAD, len(indices))) == READ_AHEAD:
        indices = _joined(indices, chunk)
    return _joined(indices, chunk)


class IndexStream:
    """The indices of a sampler whose length is not known, cut into batches as they are needed.

    Parameters
    ----------
    sampler : iterable of int
    batch_size : int
        1 or more.
    drop_last : bool
        Whether a last batch that is smaller is left out.

    Attributes
    ----------
    head : array('q') or list of int
        What was read at the start: whole batches, or, if `ended`, all batches.
    ended : bool
        Whether the end of the sampler was seen, so that no further batch comes.
    """

    def __init__(self, sampler: Iterable, batch_size: int, drop_last: bool) -> None:
        self._iterator = iter(sampler)
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._position = 0
        self._rest: array | list[int] = array("q")
        self.ended = False
        self._read(READ_AHEAD)
        whole = len(self._rest)
        if not self.ended or drop_last:
            whole -= whole % batch_size
        self.head = self._rest[:whole]
        self._rest = self._rest[whole:]

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
        elif whole < len(indices) and not self._drop_last:
            batches.append(indices[whole:])
        return batches

    def _read(self, count: int) -> None:
        while count > 0 and not self.ended:
            piece = min(count, READ_AHEAD)
            chunk = _read(self._iterator, piece, self._position)
            self.ended = len(chunk) < piece
            self._position += len(chunk)
            self._rest = _joined(self._rest, chunk)
            count -= len(chunk)


def _read(iterator: Iterator, count: int, position: int) -> array | list[int]:
    """Up to `count` indices, checked; the first of them is number `position` of the epoch."""
    values = list(islice(iterator, count))
    try:
        indices = array("q", values)
    except (TypeError, OverflowError):
        return [_checked(value, position + i) for i, value in enumerate(values)]
    if indices and min(indices) < 0:
        for i, value in enumerate(values):
            _checked(value, position + i)
    return indices


def _checked(value: object, position: int) -> int:
    try:
        index = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"sampler must yield integers, got {shown(value)} ({type(value).__name__}) "
                        f"at position {position}") from None
    if index < 0:
        raise ValueError(f"sampler must yield indices >= 0, got {shown(index)} at position {position}")
    return index


def _joined(first: array | list[int], second: array | list[int]) -> array | list[int]:
    """Both together: in 8 bytes an index, or as a list if some index is larger than that."""
    if type(first) is type(second):
        first += second  # type: ignore[operator]
        return first
    return [*first, *second]
