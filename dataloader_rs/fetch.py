"""How items are asked for. In Python, because the interpreter runs a Python ``__getitem__`` that Python code asks for
without leaving its loop; called from C, each item would cost about twice as much."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def fetch_run(dataset: Any, run: Iterator[int]) -> list:
    """The items of a run, in order. What is left in `run` after an exception tells which item raised it."""
    return [dataset[index] for index in run]
