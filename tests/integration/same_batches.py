"""For tests with other libraries: an import that may fail, and batches compared with those of another loader."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable, Mapping
from types import ModuleType

import pytest

every_size = pytest.mark.parametrize("num_workers", [0, 2, 3])


def library(name: str, *submodules: str) -> ModuleType:
    """Import `name` and the submodules; skip the test file where it is not installed, or cannot be imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it imports itself is not for us to judge
        module = pytest.importorskip(
            name, exc_type=ImportError, reason=f"{name} cannot be imported; make test-integration installs it")
        for submodule in submodules:
            importlib.import_module(f"{name}.{submodule}")
    return module


def assert_same(ours: object, theirs: object, where: str = "batch") -> None:
    """Same types, data types, shapes and values, however deep in containers."""
    assert type(ours) is type(theirs), where
    if hasattr(theirs, "dtype"):  # an array, a tensor, or a scalar of NumPy
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), where
        equal = ours == theirs
        assert equal if isinstance(equal, bool) else equal.all(), where
    elif isinstance(theirs, Mapping):
        assert list(ours) == list(theirs), where
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{where}[{key!r}]")
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), where
        for position, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(one, other, f"{where}[{position}]")
    else:
        assert ours == theirs, where


def assert_same_epochs(ours: Iterable, theirs: Iterable, num_epochs: int = 2) -> None:
    """Both give the same batches in the same order, epoch after epoch, and at least two in each."""
    for epoch in range(num_epochs):
        expected = list(theirs)
        assert len(expected) > 1
        assert_same(list(ours), expected, f"epoch {epoch}")
