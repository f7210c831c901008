"""The ways of measuring. Each looks at one contender on one workload once and returns figures by name."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import resource
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import workloads

# A consumer that computes does so for about a millisecond.
CONSUMER_TURNS = 20_000
# What a shuffle may allocate beyond what is there. A list of 10^9 indices takes four times as much, and would take the
# machine down with it.
SHUFFLE_MEMORY = 2 << 30
SHUFFLED_BATCHES = 100
MAX_ITEMS = 1 << 23


class Subject:
    """One contender on one workload with one setting: its loader, and an epoch length that fits the time there is.

    Parameters
    ----------
    contender : module
        See `contenders`.
    workload : cases.Workload
    settings : contenders.Settings
    folder : pathlib.Path
        Where datasets find their files.
    tiny : bool
        Take the fewest items that show that everything works, and measure no time to find out how many.
    """

    def __init__(self, contender, workload, settings, folder: Path, tiny: bool) -> None:
        self.contender = contender
        self.workload = workload
        self.settings = settings
        self.folder = folder
        self.tiny = tiny
        self.loader: Iterable | None = None
        self.length = 0

    def measure(self) -> dict[str, float]:
        """Once more. The first time takes longer, as it finds the length and warms up."""
        if not self.tiny:
            gc.collect()
        return self.workload.measure(self)

    def dataset(self, length: int):
        """The workload's dataset, with the base class that the loader asks for."""
        plain, base = self.workload.dataset, self.contender.BASE
        mixed = plain if base is object else type(plain.__name__, (plain, base), {"__module__": plain.__module__})
        dataset = mixed(length, self.folder)
        if self.workload.shares:
            dataset.vocabulary = self.contender.share(dataset.vocabulary)
        return dataset

    def make(self, length: int) -> Iterable:
        return self.contender.make_loader(self.dataset(length), self.settings)

    def calibrated(self) -> Iterable:
        """The loader whose epoch takes about `workload.seconds`, the same one each time."""
        if self.loader is None:
            self.length = self.workload.tiny if self.tiny else self.found_length()
            self.loader = self.make(self.length)
            consume(self.loader)
        return self.loader

    def small(self) -> Iterable:
        """The loader of eight batches, the same one each time, which has served an epoch."""
        if self.loader is None:
            self.loader = self.make(8 * self.settings.batch_size)
            consume(self.loader)
        return self.loader

    def found_length(self) -> int:
        batch_size = self.settings.batch_size
        length, wanted = 8 * batch_size, self.workload.seconds
        while True:
            loader = self.make(length)
            consume(loader)
            taken = seconds(loader)
            close(loader)
            if taken >= wanted / 4 or length >= MAX_ITEMS:
                break
            length = int(length * min(16, max(2, wanted / 2 / taken)))
        num_batches = round(length * wanted / taken / batch_size)
        return min(max(num_batches, 1), MAX_ITEMS // batch_size) * batch_size

    def close(self) -> None:
        loader, self.loader = self.loader, None
        if loader is not None:
            close(loader)


def throughput(subject: Subject) -> dict[str, float]:
    """Items per second of an epoch whose batches are dropped at once."""
    loader = subject.calibrated()
    return {"items/s": subject.length / seconds(loader)}


def first_batch_since(start: float, loader: Iterable) -> float:
    """Seconds from `start` to the first batch of an epoch that begins now; the epoch is then run to its end."""
    batches = iter(loader)
    next(batches)
    taken = time.perf_counter() - start
    for _ in batches:
        pass
    return taken


def first_batch_cold(subject: Subject) -> dict[str, float]:
    """From the call that makes a loader to its first batch."""
    dataset = subject.dataset(8 * subject.settings.batch_size)

    def once() -> float:
        start = time.perf_counter()
        loader = subject.contender.make_loader(dataset, subject.settings)
        taken = first_batch_since(start, loader)
        close(loader)
        return taken

    return {"ms": repeated(once, subject.tiny) * 1e3}


def first_batch_warm(subject: Subject) -> dict[str, float]:
    """From ``iter(loader)`` to the first batch, for a loader that has served an epoch before."""
    loader = subject.small()
    return {"ms": repeated(lambda: first_batch_since(time.perf_counter(), loader), subject.tiny) * 1e3}


def epoch_turn_round(subject: Subject) -> dict[str, float]:
    """Milliseconds for a whole epoch of eight small batches, one epoch after the other."""
    loader = subject.small()
    return {"ms": repeated(lambda: seconds(loader), subject.tiny, at_most=1_000) * 1e3}


def hand_over(subject: Subject) -> dict[str, float]:
    """How long a batch that is ready waits for the consumer that has asked for it, beside busy workers."""
    batches = iter(subject.calibrated())
    delays = []
    while True:
        asked = time.perf_counter()
        try:
            ready = next(batches)
        except StopIteration:
            break
        delays.append(time.perf_counter() - max(ready, asked))
        workloads.turns(CONSUMER_TURNS)
    delays.sort()
    return {"p50 ms": quantile(delays, 0.50) * 1e3, "p99 ms": quantile(delays, 0.99) * 1e3}


def memory(subject: Subject) -> dict[str, float]:
    """Megabytes of the process and its children after all batches, and how many came after the first tenth."""
    num_batches = 20 if subject.tiny else 5_000
    loader = subject.make(num_batches * subject.settings.batch_size)
    batches = iter(loader)
    for _ in itertools.islice(batches, num_batches // 10):
        pass
    early = resident_megabytes()
    for _ in batches:
        pass
    late = resident_megabytes()
    close(loader)
    return {"MB": late, "MB grown": late - early}


def huge_shuffle(subject: Subject) -> dict[str, float]:
    """What it costs to visit 10^9 samples in random order: to start, for each index, and in memory."""
    num_items, num_batches = (1_000, 1) if subject.tiny else (10**9, SHUFFLED_BATCHES)
    in_order = iter(subject.contender.make_loader(
        subject.dataset(num_items), dataclasses.replace(subject.settings, shuffle=False)))
    next(in_order)

    def pull(batches: Iterator) -> float:
        return seconds(itertools.islice(batches, num_batches))

    with address_space_limited(SHUFFLE_MEMORY):
        before = resident_megabytes()
        start = time.perf_counter()
        shuffled = iter(subject.make(num_items))
        next(shuffled)
        started = time.perf_counter() - start
        # In turns, so that a noisy moment does not look like the cost of a shuffle.
        extra = statistics.median(pull(shuffled) - pull(in_order) for _ in range(1 if subject.tiny else 20))
        grown = resident_megabytes() - before
    return {"start ms": started * 1e3, "ns/index": extra / num_batches / subject.settings.batch_size * 1e9,
            "MB grown": grown}


def consume(loader: Iterable) -> None:
    for _ in loader:
        pass


def seconds(loader: Iterable) -> float:
    start = time.perf_counter()
    consume(loader)
    return time.perf_counter() - start


def close(loader: Iterable) -> None:
    getattr(loader, "close", lambda: None)()


def repeated(once, tiny: bool, at_most: int = 25) -> float:
    """The median of what `once()` returns, called for about a fifth of a second but at least three times."""
    deadline = time.perf_counter() + 0.2
    taken: list[float] = []
    while len(taken) < (2 if tiny else at_most) and (len(taken) < 3 or time.perf_counter() < deadline):
        taken.append(once())
    return statistics.median(taken)


def quantile(ascending: list[float], share: float) -> float:
    return ascending[min(int(len(ascending) * share), len(ascending) - 1)]


def resident_megabytes() -> float:
    """Memory of this process and its descendants; pages that several of them share count once."""
    pages = 0
    for process in descendants(os.getpid()):
        try:
            text = Path(f"/proc/{process}/smaps_rollup").read_text()
        except OSError:  # it ended meanwhile
            continue
        pages += next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return pages / 1024


def descendants(process: int) -> Iterator[int]:
    yield process
    for task in Path(f"/proc/{process}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from descendants(int(child))


@contextmanager
def address_space_limited(allowance: int) -> Iterator[None]:
    """Let this process map `allowance` bytes more than it has now, and no more."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + allowance, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
