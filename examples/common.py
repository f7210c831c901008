"""What the examples share: real data to load, and how loaders are compared. It knows no dataset."""

import os
import platform
import statistics
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dataloader_rs import PyDataloader


def standard_library() -> list[Path]:
    """The modules of Python's own library that are one file: some 150 source files, 5 MB of real text."""
    return sorted(path for path in Path(sysconfig.get_path("stdlib")).glob("*.py") if path.stat().st_size)


def handwritten_digits() -> Any:
    """scikit-learn's 1,797 digits: `images` of 8 x 8 pixels between 0 and 16, and `target`, the digits themselves."""
    from sklearn.datasets import load_digits  # slow to import, and needed by two examples only

    return load_digits()


def items_per_second(loaders: Sequence[PyDataloader[Any, Any]], passes: int = 3) -> list["Speeds"]:
    """How fast each loader is with nothing else to do. They take turns, after one pass to warm up."""
    of_all: list[list[float]] = [[] for _ in loaders]
    for measured in range(passes + 1):
        for loader, of_loader in zip(loaders, of_all, strict=True):
            start = time.perf_counter()
            for _ in loader:
                pass
            if measured:
                of_loader.append(len(loader.dataset) / (time.perf_counter() - start))
    return [Speeds(of_loader) for of_loader in of_all]


class Speeds:
    """Items per second, one figure for each turn. Written in a text it is the median."""

    def __init__(self, of_turns: list[float]) -> None:
        self.of_turns = of_turns

    def __str__(self) -> str:
        return f"{statistics.median(self.of_turns):,.0f}"

    def against(self, other: "Speeds") -> str:
        """In words, how much faster these are. What is not so in every turn may be chance."""
        ratios = [mine / theirs for mine, theirs in zip(self.of_turns, other.of_turns, strict=True)]
        if min(ratios) >= 1.1:
            return f"{statistics.median(ratios):.1f} times as fast"
        if max(ratios) <= 0.9:
            return f"slower: {statistics.median(ratios):.2f} times the speed"
        return f"no clear difference: {min(ratios):.2f} to {max(ratios):.2f} times the speed"


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def interpreter() -> str:
    """This Python's name and version, and whether its threads run Python code in parallel."""
    kind = "with the GIL" if has_gil() else "free-threaded"
    return f"{platform.python_implementation()} {platform.python_version()} {kind}, {usable_cores()} cores"


def has_gil() -> bool:
    """Whether only one thread at a time runs Python code."""
    return getattr(sys, "_is_gil_enabled", lambda: True)()


def check(holds: bool, promise: str) -> None:
    """End the program with status 1 unless `holds`; unlike an assert, also under ``python -O``."""
    if not holds:
        sys.exit(f"wrong: {promise}")
