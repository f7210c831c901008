"""The loader in ten lines: what any number of workers must agree with."""

from __future__ import annotations


def batches(dataset, batch_size=1, indices=None, collate_fn=None, drop_last=False) -> list:
    """All batches of an epoch; an exception stands in the place of its batch."""
    indices = list(range(len(dataset)) if indices is None else indices)
    cut = [indices[start:start + batch_size] for start in range(0, len(indices), batch_size)]
    if drop_last and cut and len(cut[-1]) < batch_size:
        cut.pop()
    return [_outcome(dataset, run, collate_fn) for run in cut]


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


def _outcome(dataset, run, collate_fn):
    try:
        samples = [dataset[index] for index in run]
        return samples if collate_fn is None else collate_fn(samples)
    except BaseException as error:
        return error
