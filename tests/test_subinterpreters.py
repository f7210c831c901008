"""Subinterpreters: the package says that it works in the main interpreter only, and goes on working there."""

from __future__ import annotations

import importlib.util

import pytest

REFUSED = "dataloader_rs works in the main interpreter only"

PREAMBLE = """
import sys

try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters

def create(kind):
    if hasattr(interpreters, "exec"):
        return interpreters.create(kind)
    return interpreters.create(isolated=kind == "isolated")

def run(interpreter, source):
    failed = (getattr(interpreters, "run_string", None) or interpreters.exec)(interpreter, source)
    assert not failed, failed

IMPORT = '''if True:
    import sys
    for _ in range(2):
        try:
            import dataloader_rs
        except ImportError as error:
            print(error, flush=True)
    assert "dataloader_rs" not in sys.modules
    '''
"""

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("_interpreters") is None and importlib.util.find_spec("_xxsubinterpreters") is None,
    reason="this Python cannot make a subinterpreter from Python")

# The first has a GIL of its own, from 3.12 on; the second shares that of the main interpreter.
with_own_and_shared_gil = pytest.mark.parametrize("kind", ["isolated", "legacy"])


@with_own_and_shared_gil
def test_subinterpreter_is_refused_and_leaves_epochs_alone(run_script, kind):
    """ImportError, each time; an epoch of the main interpreter goes on over it, and the process ends in silence."""
    finished = run_script(PREAMBLE + f"""
import dataloader_rs
from toy_datasets import Ids
batches = iter(dataloader_rs.PyDataloader(Ids(40), 2, num_workers=2))
taken = [next(batches)]
for _ in range(3):
    interpreter = create({kind!r})
    run(interpreter, IMPORT)
    taken.append(next(batches))
    interpreters.destroy(interpreter)
assert taken + list(batches) == [[i, i + 1] for i in range(0, 40, 2)]
print("complete")
""")
    assert finished.stdout.splitlines() == [REFUSED] * 6 + ["complete"]


@with_own_and_shared_gil
def test_subinterpreter_that_tries_first_does_not_keep_the_main_one_out(run_script, kind):
    """Fails (ImportError in the main interpreter) where an extension module is loaded before the package refuses."""
    finished = run_script(PREAMBLE + f"""
interpreter = create({kind!r})
run(interpreter, IMPORT)
interpreters.destroy(interpreter)
import dataloader_rs
from toy_datasets import Ids
assert list(dataloader_rs.PyDataloader(Ids(4), 2, num_workers=2)) == [[0, 1], [2, 3]]
print("complete")
""")
    assert finished.stdout.splitlines() == [REFUSED] * 2 + ["complete"]


@with_own_and_shared_gil
def test_subinterpreter_in_another_thread_is_refused(run_script, kind):
    """The same while workers run, and at the end of the process workers of the main interpreter are in mid-epoch."""
    finished = run_script(PREAMBLE + f"""
import threading
from dataloader_rs import PyDataloader
from toy_datasets import Ids
batches = iter(PyDataloader(Ids(10**9), 2, num_workers=2))
def in_thread():
    interpreter = create({kind!r})
    run(interpreter, IMPORT)
    interpreters.destroy(interpreter)
thread = threading.Thread(target=in_thread)
thread.start()
while thread.is_alive():
    next(batches)
print("complete")
""")
    assert finished.stdout.splitlines() == [REFUSED] * 2 + ["complete"]
