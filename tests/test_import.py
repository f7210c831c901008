"""Importing the package costs little: it brings in no library and nothing of Python's own that only few need."""

from __future__ import annotations

import pytest

# What is imported beyond the modules of Python's own that the package is made with: these come first here, and any that
# they bring in. The others that are left out are built into Python, or Cython's.
NEW = """
import sys
import __future__, array, atexit, collections.abc, copy, functools, importlib, itertools, math, operator, os, reprlib
import struct, threading, time, types, warnings, weakref
known = set(sys.modules)
import dataloader_rs
print(sorted(name for name in set(sys.modules) - known
             if not name.startswith(("dataloader_rs", "_cython_", "cython_runtime", "_xxsubinterpreters")) and
             name not in sys.builtin_module_names))
"""


def test_import_brings_in_nothing_else(run_script):
    """Neither NumPy, which is optional, nor `inspect`, `email` or others of Python's own that take long to import."""
    assert run_script(NEW).stdout == "[]\n"


@pytest.mark.parametrize("wanted", ["version", "loader", "arrays"])
def test_what_comes_late_comes_when_it_is_needed(run_script, wanted):
    """The version, a loader and an array each bring in what they need, and not before."""
    uses = {"version": ("importlib.metadata", "dataloader_rs.__version__"),
            "loader": ("inspect", "dataloader_rs.PyDataloader(dataloader_rs.PyDataset.of([1]))"),
            "arrays": ("numpy", "dataloader_rs.default_collate([1, 2])")}
    module, expression = uses[wanted]
    if wanted == "arrays":
        pytest.importorskip("numpy")
    script = f"""
        import sys
        import dataloader_rs
        assert {module!r} not in sys.modules
        {expression}
        assert {module!r} in sys.modules
    """
    run_script(script)
