"""spdl's pipeline of threads, built as its documentation does for data that has a length and an index.

The source yields runs of indices and one stage loads a batch of each, which is the fastest way for small items. With
items in parallel the source yields indices, and batches are aggregated after the stage that loads items.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

from spdl.pipeline import Pipeline, PipelineBuilder

from contenders import Settings, batch_fetcher, runs_of

DISTRIBUTIONS = ("spdl-core",)
BASE = object


def refuses(workload, settings: Settings) -> str:
    return "" if settings.num_workers else "has no mode without threads"


class Runs:
    """The batches of each epoch, once it is asked for.

    Without that wait the pipeline would load the beginning of the next epoch between two epochs, while no clock runs.
    """

    def __init__(self, length: int, settings: Settings) -> None:
        self.length = length
        self.settings = settings
        self.asked_for = threading.Semaphore(0)
        self.closed = False

    def __iter__(self) -> Iterator:
        self.asked_for.acquire()
        if self.closed:
            # For whoever tries again before the pipeline has stopped.
            self.asked_for.release()
            return iter(())
        return self.epoch()

    def epoch(self) -> Iterator:
        return runs_of(self.length, self.settings)


class Items(Runs):
    def epoch(self) -> Iterator:
        return itertools.chain.from_iterable(super().epoch())


class Epochs:
    """A pipeline that serves one epoch after the other."""

    def __init__(self, dataset, settings: Settings) -> None:
        builder = PipelineBuilder()
        num_threads = settings.num_workers * settings.items_in_parallel
        if settings.items_in_parallel == 1:
            self.source = Runs(len(dataset), settings)
            builder.add_source(self.source, continuous=True)
            builder.pipe(batch_fetcher(dataset, settings), concurrency=num_threads, output_order="input")
        else:
            self.source = Items(len(dataset), settings)
            builder.add_source(self.source, continuous=True)
            builder.pipe(dataset.__getitem__, concurrency=num_threads, output_order="input")
            builder.aggregate(settings.batch_size)
            if settings.collate_fn is not None:
                builder.pipe(settings.collate_fn, concurrency=settings.num_workers, output_order="input")
        builder.add_sink(settings.prefetch_depth)
        self.pipeline: Pipeline = builder.build(num_threads=num_threads)
        self.started = False

    def __iter__(self) -> Iterator[object]:
        if not self.started:
            self.pipeline.start()
            self.started = True
        self.source.asked_for.release()
        return self.pipeline.get_iterator()

    def close(self) -> None:
        self.source.closed = True
        self.source.asked_for.release()
        if self.started:
            self.pipeline.stop()


def make_loader(dataset, settings: Settings) -> Epochs:
    return Epochs(dataset, settings)
