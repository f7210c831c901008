"""How items are asked for. In Python, because the interpreter runs a Python ``__getitem__`` that Python code asks for
without leaving its loop; called from C, each item would cost about twice as much."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType
from weakref import WeakKeyDictionary

from dataloader_rs.hints import Any


def _fetch_run(dataset: Any, run: Iterator[int]) -> list[Any]:
    return [dataset[index] for index in run]


def fetch_run_for(dataset: object) -> Callable[[Any, Iterator[int]], list[Any]]:
    """A function ``fetch_run(dataset, run)`` that returns the items of a run, in order.

    What is left in `run` after an exception tells which item raised it. Each type of dataset has a copy of its own,
    because the interpreter tunes a piece of code to the types that it meets there: loaders of two kinds of dataset that
    shared it would undo each other's.
    """
    try:
        function = _of_type.get(type(dataset))
    except TypeError:  # its metaclass makes it unhashable
        return _fetch_run
    if function is None:
        function = FunctionType(_fetch_run.__code__.replace(), globals(), "fetch_run")
        _of_type[type(dataset)] = function
    return function


_of_type: WeakKeyDictionary[type, Callable[[Any, Iterator[int]], list[Any]]] = WeakKeyDictionary()
