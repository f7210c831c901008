"""spdl's pipeline of threads, built as its documentation does for data that has a length and an index.

The source yields runs of indices and one stage loads a batch of each, which is the fastest way for small items. With
items in parallel the source yields indices, and batches are aggregated after the stage that loads items.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from spdl.pipeline import Pipeline, PipelineBuilder

from contenders import Settings, batch_fetcher, runs_of

DISTRIBUTIONS = ("spdl-core",)
BASE = object


def refuses(workload, settings: Settings) -> str:
    return "" if settings.num_workers else "has no mode without threads"


class Runs:
    """The batches of an epoch, anew each time it is iterated."""

    def __init__(self, length: int, settings: Settings) -> None:
        self.length = length
        self.settings = settings

    def __iter__(self) -> Iterator[list[int]]:
        return runs_of(self.length, self.settings)


class Items(Runs):
    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(super().__iter__())


class Epochs:
    """A pipeline that serves one epoch after the other. Its source runs ahead into the next."""

    def __init__(self, dataset, settings: Settings) -> None:
        builder = PipelineBuilder()
        num_threads = settings.num_workers * settings.items_in_parallel
        if settings.items_in_parallel == 1:
            builder.add_source(Runs(len(dataset), settings), continuous=True)
            builder.pipe(batch_fetcher(dataset, settings), concurrency=num_threads, output_order="input")
        else:
            builder.add_source(Items(len(dataset), settings), continuous=True)
            builder.pipe(dataset.__getitem__, concurrency=num_threads, output_order="input")
            builder.aggregate(settings.batch_size)
            if settings.collate_fn is not None:
                builder.pipe(settings.collate_fn, concurrency=settings.num_workers, output_order="input")
        builder.add_sink(settings.prefetch_depth)
        self.settings = settings
        self.pipeline: Pipeline = builder.build(num_threads=num_threads)
        self.started = False

    def __iter__(self) -> Iterator[object]:
        if not self.started:
            self.pipeline.start()
            self.started = True
        return self.pipeline.get_iterator()

    def close(self) -> None:
        if self.started:
            self.pipeline.stop()


def make_loader(dataset, settings: Settings) -> Epochs:
    return Epochs(dataset, settings)
