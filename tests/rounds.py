"""One round of a soak: a loader with random arguments over a random dataset, and an account of all that it gives.

What each epoch must give is worked out beforehand, without a loader: a list of outcomes, one for each batch, which is a
run of samples, or the exception that takes its place.
"""

from __future__ import annotations

import gc
import itertools
import random
import threading
import zlib
from typing import Any, NamedTuple

import numpy as np
from toy_datasets import Ids

from dataloader_rs import PyDataloader, PyIterableDataset, default_collate
from dataloader_rs._shuffle import ShuffledOrder

ROW = 600  # numbers in an array: more than the 4 KiB from which on memory is recycled
COLLECT_AT = 149  # items of which one in so many collects garbage
PATIENCE = 60.0  # for a batch; only a fault waits for it


class Fault(AssertionError):
    """The loader gave what it must not give."""


class Damaged(Exception):
    """Raised on purpose. ``args`` is where."""


class Tally:
    """Plain counts, so that keeping them takes no memory."""

    def __init__(self) -> None:
        self.loaders = self.epochs = self.batches = self.samples = self.errors = self.breaks = self.lost = 0
        self.collections = self.workers_started = self.workers_ended = 0
        self.checksum = 0
        self.lock = threading.Lock()

    def add(self, **amounts: int) -> None:
        with self.lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)


# ---- samples that know what they must be ----


def record(index: int) -> tuple[int, bytes, int]:
    payload = index.to_bytes(4, "little") * (1 + index % 40)
    return index, payload, zlib.crc32(payload)


def arrays(index: int) -> dict[str, Any]:
    return {"index": index, "row": np.arange(ROW) + index}


def check_record(sample: Any, index: int) -> None:
    if sample[0] != index or zlib.crc32(sample[1]) != sample[2] or sample != record(index):
        raise Fault(f"sample {index} is {sample}")


def check_batch(batch: Any, indices: tuple[int, ...]) -> None:
    """Is it made of these samples, byte by byte?"""
    if isinstance(batch, dict):
        rows = np.arange(ROW)[None] + np.array(indices)[:, None]
        if batch["index"].tolist() != list(indices) or not np.array_equal(batch["row"], rows):
            raise Fault(f"a batch of {indices} is {batch}")
    elif isinstance(batch, tuple):
        check_record(batch, *indices)
    else:
        if len(batch) != len(indices):
            raise Fault(f"a batch of {indices} is {batch}")
        for sample, index in zip(batch, indices, strict=True):
            check_record(sample, index)


def indices_of(batch: Any) -> tuple[int, ...]:
    if isinstance(batch, dict):
        return tuple(batch["index"].tolist())
    if isinstance(batch, tuple):
        return (batch[0],)
    return tuple(sample[0] for sample in batch)


class Soaked(Ids):
    """Items of one kind, some of which raise."""

    def __init__(self, length: int, make: Any, bad: frozenset[int], kept: list | None = None) -> None:
        super().__init__(length)
        self.make, self.bad, self.kept = make, bad, kept

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise Damaged(index)
        if index % COLLECT_AT == COLLECT_AT - 1:
            gc.collect()
        return self.make(index)


class SoakedMany(Soaked):
    """The same, asked for a whole batch at a time."""

    def __getitems__(self, indices: list[int]) -> list:
        return [self[index] for index in indices]


class SoakedStream(PyIterableDataset):
    """The same, in a row."""

    def __init__(self, length: int, make: Any, bad: frozenset[int]) -> None:
        self.items = Soaked(length, make, bad)

    def __iter__(self):
        return (self.items[index] for index in range(len(self.items)))


class SoakedShards(SoakedStream):
    """The same, in several rows."""

    def shards(self, num_shards: int) -> list:
        return [(self.items[index] for index in range(first, len(self.items), num_shards))
                for first in range(num_shards)]


class Unsized:
    """A sampler that does not say how long it is."""

    def __init__(self, values: list) -> None:
        self.values = values

    def __iter__(self):
        return iter(self.values)


# ---- what an epoch must give ----


class Outcome(NamedTuple):
    """Of one batch: its samples, or where the exception says that it was raised."""

    indices: tuple[int, ...]
    error: Any = None


def cut(indices: list[int], batch_size: int | None, drop_last: bool) -> list[tuple[int, ...]]:
    size = batch_size or 1
    runs = [tuple(indices[start:start + size]) for start in range(0, len(indices), size)]
    if drop_last and runs and len(runs[-1]) < size:
        runs.pop()
    return runs


class Round:
    """A loader with random arguments, and what its epochs must give.

    Parameters
    ----------
    rng : random.Random
        Everything is drawn from it.
    tally : Tally
    kept : list or None
        To plant a leak: each epoch adds an object.
    """

    def __init__(self, rng: random.Random, tally: Tally, kept: list | None = None) -> None:
        self.rng, self.tally, self.kept = rng, tally, kept
        self.epoch = 0
        self.kind = rng.choice(["items", "items", "many", "shuffle", "sampler", "unsized", "batches", "stream",
                                "shards"])
        self.is_stream = self.kind in ("stream", "shards")
        self.num_workers = rng.choice([0, 1, 1, 2, 2, 3, 4, 6])
        self.length = rng.choice([0, 1, rng.randrange(40), rng.randrange(400)])
        self.batch_size = rng.choice([1, 2, 3, 8, 16, None])
        self.drop_last = self.batch_size is not None and self.kind != "batches" and rng.random() < 0.3
        self.in_order = rng.random() < 0.7
        self.seed = rng.randrange(2**32)
        few = [index for index in range(self.length) if rng.random() < 0.02] if rng.random() < 0.4 else []
        # How the errors of one shard end the others is no matter of an account.
        self.bad = frozenset(few) if self.kind != "shards" else frozenset()
        self.bad_batches = frozenset(index for index in range(self.length) if rng.random() < 0.05) \
            if rng.random() < 0.3 else frozenset()
        self.bad_worker = 0 if self.num_workers and rng.random() < 0.03 else None
        self.of_arrays = self.batch_size is not None and rng.random() < 0.4
        make = arrays if self.of_arrays else record
        dataset: Any
        if self.is_stream:
            dataset = (SoakedStream if self.kind == "stream" else SoakedShards)(self.length, make, self.bad)
        else:
            dataset = (SoakedMany if self.kind == "many" else Soaked)(self.length, make, self.bad)
        self.runs: list = []
        arguments: dict[str, Any] = {}
        if self.kind in ("sampler", "unsized"):
            self.runs = [rng.randrange(self.length) for _ in range(self.length)]
            arguments["sampler"] = self.runs if self.kind == "sampler" else Unsized(self.runs)
        elif self.kind == "batches":
            self.runs = [[rng.randrange(self.length) for _ in range(rng.randrange(1, 9))]
                         for _ in range(self.length // 4)]
            arguments["batch_sampler"] = self.runs if rng.random() < 0.5 else Unsized(self.runs)
            self.batch_size = 1
        elif self.kind == "shuffle":
            arguments.update(shuffle=True, seed=self.seed)
        if not self.is_stream:
            arguments.update(items_in_parallel=rng.choice([1, 1, 1, 2, 3]), across_epochs=rng.random() < 0.4,
                             serial_dataset=rng.random() < 0.1)
        if self.num_workers:
            arguments.update(timeout=PATIENCE, worker_init_fn=self.start_worker, worker_exit_fn=self.end_worker)
        self.loader = PyDataloader(
            dataset, self.batch_size, rng.choice([1, 2, 5, 50]), num_workers=self.num_workers, drop_last=self.drop_last,
            collate_fn=self.collate, in_order=self.in_order, adaptive=rng.random() < 0.7,
            defer_refcount=rng.random() < 0.7, **arguments)
        if rng.random() < 0.2:
            dataset.loader = self.loader  # only the collector frees the two
        tally.add(loaders=1)

    def start_worker(self, worker: int) -> None:
        if worker == self.bad_worker:
            raise Damaged("start")
        self.tally.add(workers_started=1)

    def end_worker(self, worker: int) -> None:
        self.tally.add(workers_ended=1)

    def collate(self, samples: Any) -> Any:
        if isinstance(samples, tuple):
            first = samples[0]
        else:
            first = samples[0]["index"] if self.of_arrays else samples[0][0]
        if first in self.bad_batches:
            raise Damaged("collate", first)
        return default_collate(samples) if self.of_arrays else samples

    def expected(self) -> list[Outcome]:
        """What the next epoch must give."""
        number, self.epoch = self.epoch, self.epoch + 1
        if self.kind == "batches":
            runs = [tuple(run) for run in self.runs]
        elif self.kind in ("sampler", "unsized"):
            runs = cut(self.runs, self.batch_size, self.drop_last)
        elif self.kind == "shuffle":
            runs = cut(ShuffledOrder(self.length, self.seed, number)[:], self.batch_size, self.drop_last)
        elif self.kind == "shards" and self.num_workers > 1:
            shards = [cut(list(range(first, self.length, self.num_workers)), self.batch_size, self.drop_last)
                      for first in range(self.num_workers)]
            turns = itertools.chain(*itertools.zip_longest(*shards))
            runs = [run for run in turns if run is not None]
        else:
            runs = cut(list(range(self.length)), self.batch_size, self.drop_last)
        outcomes = []
        for run in runs:
            bad = next((index for index in run if index in self.bad), None)
            if bad is not None:
                outcomes.append(Outcome(run, (bad,)))
                if self.is_stream:
                    break
            elif run[0] in self.bad_batches:
                outcomes.append(Outcome(run, ("collate", run[0])))
            else:
                outcomes.append(Outcome(run))
        if self.kind == "stream" and self.bad and not (outcomes and outcomes[-1].error == (min(self.bad),)):
            # In what would have been the rest that is dropped.
            outcomes.append(Outcome((), (min(self.bad),)))
        # Where there are no indices nobody waits for workers; whether a stream has samples they must find out.
        if self.bad_worker is not None and (runs or self.is_stream):
            return [Outcome((), ("start",))]
        return outcomes

    def run_epoch(self) -> Any:
        """Iterate one epoch, or the beginning of one, and hold it to what it must give.

        Returns
        -------
        iterator or None
            What the epoch was left with, if it was left early.
        """
        rng, tally = self.rng, self.tally
        expected = self.expected()
        if self.kept is not None:
            self.kept.append(object())
        stop_after = rng.randrange(len(expected) + 1) if expected and rng.random() < 0.3 else None
        held = []  # batches that are looked at again later: their memory must not have been used again meanwhile
        batches = iter(self.loader)
        found: list[Outcome] = []
        while stop_after is None or len(found) < stop_after:
            try:
                batch = next(batches)
            except StopIteration:
                break
            except Damaged as error:
                found.append(Outcome((), error.args))
                tally.add(errors=1)
                continue
            indices = indices_of(batch)
            check_batch(batch, indices)
            found.append(Outcome(indices))
            if rng.random() < 0.2 and len(held) < 8:
                held.append((batch, indices))
            del batch
            if rng.random() < 0.002:
                tally.add(collections=1)
                gc.collect()
        for old, indices in held:
            check_batch(old, indices)
        self.account(expected, found, stop_after is not None)
        return batches if stop_after is not None else None

    def account(self, expected: list[Outcome], found: list[Outcome], left_early: bool) -> None:
        """Is everything there that must be, and nothing else?"""
        wanted = [outcome if outcome.error is None else Outcome((), outcome.error) for outcome in expected]
        if self.in_order:
            agree = wanted[:len(found)] == found
        else:
            rest = list(wanted)
            agree = True
            for outcome in found:
                if outcome in rest:
                    rest.remove(outcome)
                else:
                    agree = False
        missing = 0 if left_early else len(wanted) - len(found)
        if not agree or missing:
            self.tally.add(lost=max(1, missing))
            raise Fault(f"{self.loader!r} of {self.length} {self.kind}, epoch {self.epoch - 1}, must give {wanted}\n"
                        f"and gave {found}")
        samples = [index for outcome in found for index in outcome.indices]
        self.tally.add(epochs=1, batches=sum(outcome.error is None for outcome in found), samples=len(samples),
                       checksum=sum(samples), breaks=left_early)


def run_rounds(rng: random.Random, tally: Tally, is_over: Any, kept: list | None = None) -> None:
    """Rounds until ``is_over()``; some of what epochs were left with stays around for a while."""
    left: list = []
    while not is_over():
        one = Round(rng, tally, kept)
        for _ in range(rng.randrange(1, 5)):
            rest = one.run_epoch()
            if rest is not None and rng.random() < 0.5:
                left.append(rest)
            del rest
            if rng.random() < 0.05:
                one.loader.close()
        if len(left) > 5 or rng.random() < 0.2:
            left.clear()
        if rng.random() < 0.02:
            tally.add(collections=1)
            gc.collect()
