"""The loader in ten lines: what any number of workers must agree with."""

from __future__ import annotations

from itertools import zip_longest


def batches(dataset, batch_size=1, indices=None, collate_fn=None, drop_last=False) -> list:
    """All batches of an epoch; an exception stands in the place of its batch."""
    indices = list(range(len(dataset)) if indices is None else indices)
    return [outcome(dataset, run, collate_fn) for run in cut(indices, batch_size, drop_last)]


def cut(indices: list, batch_size: int | None, drop_last: bool = False) -> list[list]:
    """The indices of each batch; without a batch size, of each sample."""
    size = batch_size or 1
    runs = [indices[start:start + size] for start in range(0, len(indices), size)]
    if drop_last and runs and len(runs[-1]) < size:
        runs.pop()
    return runs


def outcome(dataset, run: list, collate_fn=None, single: bool = False):
    """A batch, or the exception in its place; `single`: it is one sample, and no list."""
    try:
        samples = [dataset[index] for index in run]
        batch = samples[0] if single else samples
        return batch if collate_fn is None else collate_fn(batch)
    except BaseException as error:
        return error


def in_turns(shards: list[list]) -> list:
    """The first batch of each shard, then the second, and so on; a shard that has ended is passed over."""
    missing = object()
    return [batch for turn in zip_longest(*shards, fillvalue=missing) for batch in turn if batch is not missing]


def drained(iterator) -> list:
    """What an iterator gives until it ends, exceptions included."""
    outcomes = []
    while True:
        try:
            outcomes.append(next(iterator))
        except StopIteration:
            return outcomes
        except BaseException as error:
            outcomes.append(error)
