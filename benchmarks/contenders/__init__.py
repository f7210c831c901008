"""One module for each loader that is compared, all with the same interface.

DISTRIBUTIONS : tuple of str
    Packages whose versions belong to the result.
BASE : type
    The class that the loader wants its datasets to inherit; `object` if it wants none.
refuses(workload, settings) -> str
    Why the loader has nothing for this, in a few words; empty if it can.
make_loader(dataset, settings) -> iterable
    Something that can be iterated again and again, an epoch each time, and that may have a ``close()``.
share(obj) -> obj, optional
    What the loader offers to make a table cheap to read from many threads.

A module is imported only in the environment that has its library.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """What a loader is asked for. A contender without such an argument takes the nearest it has.

    `prefetch_depth` counts batches beyond the `num_workers` in progress.
    """

    batch_size: int
    num_workers: int = 0
    prefetch_depth: int = 4
    items_in_parallel: int = 1
    shuffle: bool = False
    collate_fn: Callable[[list], object] | None = None


def order_of(length: int, settings: Settings) -> Sequence[int]:
    """The indices of an epoch, for contenders that leave this to their user."""
    if not settings.shuffle:
        return range(length)
    indices = list(range(length))
    random.shuffle(indices)
    return indices


def runs_of(length: int, settings: Settings) -> Iterator[list[int]]:
    """The same, cut into batches."""
    order, size = order_of(length, settings), settings.batch_size
    return (list(order[start:start + size]) for start in range(0, length, size))


def batch_fetcher(dataset, settings: Settings) -> Callable[[list[int]], object]:
    """A function that loads the batch of a run of indices, as short as it can be written by hand."""
    get, get_many = dataset.__getitem__, getattr(dataset, "__getitems__", None)
    collate = settings.collate_fn
    if get_many is not None:
        return get_many if collate is None else lambda run: collate(get_many(run))
    if collate is None:
        return lambda run: [get(index) for index in run]
    return lambda run: collate([get(index) for index in run])
