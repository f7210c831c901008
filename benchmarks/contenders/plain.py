"""No loader: a list comprehension over each run of indices, in the calling thread."""

from __future__ import annotations

from collections.abc import Iterator

from contenders import Settings, runs_of

DISTRIBUTIONS = ()
BASE = object


def refuses(workload, settings: Settings) -> str:
    return "has no workers" if settings.num_workers else ""


class Plain:
    def __init__(self, dataset, settings: Settings) -> None:
        self.dataset = dataset
        self.settings = settings

    def __iter__(self) -> Iterator[object]:
        # Written out instead of asking a function for each batch: nothing may be between the loop and the items.
        get, get_many = self.dataset.__getitem__, getattr(self.dataset, "__getitems__", None)
        collate = self.settings.collate_fn
        for run in runs_of(len(self.dataset), self.settings):
            samples = [get(index) for index in run] if get_many is None else get_many(run)
            yield samples if collate is None else collate(samples)


def make_loader(dataset, settings: Settings) -> Plain:
    return Plain(dataset, settings)
