"""Importing the package costs little: it brings in no library and nothing of Python's own that only few need."""

from __future__ import annotations

import pytest

# What is imported beyond the modules of Python's own that the package is made with: these come first here, and any that
# they bring in. The others that are left out are built into Python, or Cython's.
NEW = """
import sys
import __future__, array, atexit, collections.abc, functools, itertools, operator, os, reprlib, threading, time, types
import weakref
known = set(sys.modules)
import dataloader_rs
print(sorted(name for name in set(sys.modules) - known
             if not name.startswith(("dataloader_rs", "_cython_", "cython_runtime", "_xxsubinterpreters")) and
             name not in sys.builtin_module_names))
"""

# Each takes about a third of a millisecond to find and to read.
MOST_FILES_OF_OURS = 23

OURS = """
import sys
import dataloader_rs
print(*(name for name in sys.modules if name.startswith("dataloader_rs.")))
"""


def test_import_brings_in_nothing_else(run_script):
    """Neither NumPy, which is optional, nor `typing`, `inspect` or others of Python's own that take long to import."""
    assert run_script(NEW).stdout == "[]\n"


def test_import_reads_what_every_loader_needs(run_script):
    """Not what is for arrays, for tables that are shared, for pinned memory, or for type checkers only."""
    ours = {name.removeprefix("dataloader_rs.") for name in run_script(OURS).stdout.split()}
    assert not ours & {"_buffers", "_share", "collate", "containers", "pinning", "protocols", "sample_seed", "sharing"}
    assert {"_core", "loader"} < ours
    assert len(ours) <= MOST_FILES_OF_OURS


@pytest.mark.parametrize(("module", "expression"), [
    ("importlib.metadata", "dataloader_rs.__version__"),
    ("inspect", "dataloader_rs.PyDataloader(dataloader_rs.PyDataset.of(AnswersAll([1])))"),
    ("numpy", "dataloader_rs.default_collate([1, 2])"),
    ("typing", "dataloader_rs.PyDataloader[int]"),
    ("dataloader_rs.collate", "dataloader_rs.default_collate"),
    ("dataloader_rs.collate", "dataloader_rs.register_collate"),
    ("dataloader_rs.collate", "dataloader_rs.collate.buffer_usage()"),
    ("dataloader_rs.sharing", "dataloader_rs.share"),
    ("dataloader_rs.sharing", "dataloader_rs.sharing.share"),
    ("dataloader_rs.containers", "dataloader_rs.containers"),
    ("dataloader_rs.pinning", "dataloader_rs.pinning"),
    ("dataloader_rs.pinning", "dataloader_rs.PyDataloader(dataloader_rs.PyDataset.of([1]), pin_memory=True)"),
])
def test_what_comes_late_comes_when_it_is_needed(run_script, module, expression):
    """The version, a loader, an array and others each bring in what they need, and not before."""
    if module == "numpy":
        pytest.importorskip("numpy")
    script = f"""
        import sys
        import dataloader_rs
        class AnswersAll(list):
            def __getattr__(self, name):
                return None
        assert {module!r} not in sys.modules
        {expression}
        assert {module!r} in sys.modules
    """
    run_script(script)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_usual_loader_brings_in_nothing(run_script, num_workers):
    """Of what takes long to import: `inspect` is for datasets that answer for attributes which they do not have.

    Workers bring in what CPython shows an error with, which many programs have.
    """
    run_script("""
        import sys
        import dataloader_rs
        num_workers = int(sys.argv[1])
        if num_workers > 0:
            dataloader_rs.threads.import_what_shows_errors()
        before = set(sys.modules)
        class Usual(dataloader_rs.PyDataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                return index
        assert list(dataloader_rs.PyDataloader(Usual(), 2, num_workers=num_workers, shuffle=True, seed=1))
        assert set(sys.modules) == before
    """, str(num_workers))


def test_names_that_come_late_are_like_all_others(run_script):
    """They are listed, come with a star, and are the same object each time. Other names are AttributeErrors."""
    script = """
        import dataloader_rs
        assert set(dataloader_rs.__all__) <= set(dir(dataloader_rs))
        from dataloader_rs import *
        assert all(globals()[name] is getattr(dataloader_rs, name) for name in dataloader_rs.__all__)
        import dataloader_rs.collate, dataloader_rs.sharing
        assert default_collate is dataloader_rs.collate.default_collate
        assert share is dataloader_rs.sharing.share
        try:
            dataloader_rs.PyDataLoader
        except AttributeError as error:
            assert str(error) == "module 'dataloader_rs' has no attribute 'PyDataLoader'", error
        else:
            raise AssertionError
    """
    run_script(script)


def test_import_works_without_docstrings_and_assertions(run_script):
    """As under ``python -OO``, where classes have no docstring either."""
    script = """
        import dataloader_rs
        from dataloader_rs import *
        assert False
        if list(PyDataloader(PyDataset.of(range(3)), 2, num_workers=1, worker_init_fn=print)) != [[0, 1], [2]]:
            raise SystemExit("other batches")
        if dataloader_rs.WorkerInfo.__doc__ != "WorkerInfo(" + ", ".join(dataloader_rs.WorkerInfo._fields) + ")":
            raise SystemExit(dataloader_rs.WorkerInfo.__doc__)
    """
    assert run_script(script, options=("-OO",)).stdout == "0\n"
