"""The speeds that the loader promises, as ratios measured in one run.

    python benchmarks/marks.py

Contenders take turns within a run, and the middle of several rounds counts, because a noisy machine slows all of
them. Beside what the loader reaches with two workers stands what two bare threads reach with the same calls: no loader
of any kind can be faster than that.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable

from dataloader_rs import PyDataloader, PyDataset

ROUNDS = 9


class Ids(PyDataset[int]):
    """The emptiest dataset."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Work(Ids):
    """About a millisecond of pure Python on data of the thread."""

    def __init__(self, length: int, turns: int) -> None:
        super().__init__(length)
        self.turns = turns

    def __getitem__(self, index: int) -> int:
        total = index
        for number in range(self.turns):
            total = (total * 31 + number) & 0xFFFF
        return total


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def compared(contenders: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of each, the median of rounds in which they take turns after one to warm up."""
    rounds = [{name: seconds(function) for name, function in contenders.items()} for _ in range(ROUNDS + 1)]
    return {name: statistics.median(taken[name] for taken in rounds[1:]) for name in contenders}


def consume(loader: PyDataloader) -> None:
    for _ in loader:
        pass


def hand_written(dataset: Ids, batch_size: int) -> None:
    for start in range(0, len(dataset), batch_size):
        run = list(range(start, min(start + batch_size, len(dataset))))
        [dataset[i] for i in run]


def bare_threads(dataset: Ids, num_threads: int) -> None:
    """The same calls on threads of their own that share nothing but the dataset."""

    def work(first: int) -> None:
        for i in range(first, len(dataset), num_threads):
            dataset[i]

    threads = [threading.Thread(target=work, args=(first,)) for first in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def overhead() -> None:
    dataset = Ids(320_000)
    taken = compared({
        "hand": lambda: hand_written(dataset, 32),
        "none": lambda loader=PyDataloader(dataset, batch_size=32): consume(loader),
    })
    show("return i, batch 32, no workers / hand-written loop", taken["hand"] / taken["none"], "at least 0.95")


def scaling() -> None:
    turns = 1_000
    turns = int(turns * 1e-3 / min(seconds(lambda: Work(1, turns)[0]) for _ in range(20)))
    dataset = Work(400, turns)
    taken = compared({
        "none": lambda loader=PyDataloader(dataset, batch_size=8): consume(loader),
        "two": lambda loader=PyDataloader(dataset, batch_size=8, num_workers=2): consume(loader),
        "bare": lambda: bare_threads(dataset, 2),
        "one": lambda: bare_threads(dataset, 1),
    })
    show("1 ms of pure Python, 2 workers / no workers", taken["none"] / taken["two"],
         "free-threaded at least 1.8, else 0.85")
    show("    the same, 2 bare threads / 1", taken["one"] / taken["bare"], "the limit")


def starts() -> None:
    loader = PyDataloader(Ids(64), batch_size=8, num_workers=4)

    def epochs() -> None:
        for _ in range(200):
            consume(loader)

    show("200 epochs of 8 batches, 4 workers, seconds", statistics.median(seconds(epochs) for _ in range(ROUNDS)),
         "at most 2")

    def cold() -> None:
        next(iter(PyDataloader(Ids(64), batch_size=8, num_workers=2)))

    def warm() -> None:
        next(iter(loader))

    for name, function in (("cold", cold), ("warm", warm)):
        taken = [seconds(function) for _ in range(50)]
        show(f"first batch, {name}, ms: median", statistics.median(taken) * 1e3, "under 2")


def show(name: str, value: float, mark: str) -> None:
    print(f"{name:<55} {value:8.3f}   ({mark})")


def main() -> None:
    gil = "GIL" if getattr(sys, "_is_gil_enabled", lambda: True)() else "free-threaded"
    print(f"CPython {platform.python_version()} ({gil}), {len(os.sched_getaffinity(0))} cores, {platform.machine()}")
    overhead()
    scaling()
    starts()


if __name__ == "__main__":
    main()
