"""Fixtures: no worker outlives its test unseen, and scripts run in a process of their own."""

from __future__ import annotations

import fcntl
import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest
from tasks import status_of, statuses_of_workers

TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS))

# Which programs test_model.py runs: the same in every run, unless it is told another number.
MODEL_SEED = int(os.environ.get("MODEL_SEED", "1"))

# How much longer than usual things may take: more than 1 under a sanitizer (sanitize.py).
SLOWDOWN = float(os.environ.get("DLRS_SLOWDOWN", "1"))

FREE_THREADED = not getattr(sys, "_is_gil_enabled", lambda: True)()


def worker_threads() -> set[str]:
    """The threads of this process whose name says that they are workers of a loader."""
    return {f"{thread} {status['Name']}" for thread, status in statuses_of_workers().items()}


def blocked_signals(thread: int) -> int:
    """The mask of the thread with this native id; bit n - 1 is signal n."""
    return int(status_of(str(thread))["SigBlk"], 16)


def is_parked(thread: int) -> bool:
    """Does the worker with this native id wait for work? It has Ctrl-C blocked then, and only then."""
    return bool(blocked_signals(thread) >> signal.SIGINT - 1 & 1)


def without_address(value: object) -> str:
    """A repr that is the same in all processes, as names of tests must be."""
    return re.sub(r" at 0x\w+", "", repr(value))


def eventually(condition, patience: float = 10.0) -> bool:
    """Wait until `condition()` holds; False if it does not within `patience` seconds, or SLOWDOWN times that."""
    deadline = time.monotonic() + patience * SLOWDOWN
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


class _Turnstile:
    """Lets tests run side by side, in several processes, but for those that measure time, which run alone.

    Who wants to be alone keeps the others out at the gate while it waits for those that are inside. Both are locks on
    folders of the checkout, so two runs in one checkout keep out of each other's measurements, too.
    """

    def __init__(self) -> None:
        self.gate, self.room = (os.open(folder, os.O_RDONLY) for folder in [TESTS, TESTS / "c"])

    @contextmanager
    def inside(self, alone: bool) -> Iterator[None]:
        fcntl.flock(self.gate, fcntl.LOCK_EX)
        fcntl.flock(self.room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(self.gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self.room, fcntl.LOCK_UN)


# pytest-xdist says so in the environment of each of its processes.
_turnstile = _Turnstile() if "PYTEST_XDIST_WORKER" in os.environ else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item):
    """Wait for one's turn. Outside of all else, so that the wait is no part of the time that a test may take."""
    with _turnstile.inside(item.get_closest_marker("timing") is not None) if _turnstile else nullcontext():
        return (yield)


def pytest_collection_finish() -> None:
    """Take what is there before the first test out of the collector's sight: a collection is ten times quicker then."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_worker_is_left():
    """Every worker a test started ends once the test is over and its garbage is collected."""
    before = worker_threads()
    yield
    # Most are gone by now, and collecting costs more than most tests do. What a worker still holds is garbage later.
    if not eventually(lambda: worker_threads() <= before, 0.01):
        assert eventually(lambda: gc.collect() >= 0 and worker_threads() <= before), worker_threads() - before


@pytest.fixture(params=[0, 1, 4])
def num_workers(request) -> int:
    return request.param


def child_environment() -> dict[str, str]:
    """The environment of a child process that imports what is in this folder."""
    paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.fixture
def run_script(tmp_path):
    """Run a script in a child process and return the finished process.

    ``run_script(source, *arguments, timeout=30, status=0, stderr="", warnings="error", options=())``: the exit status
    must be `status` (None: any), standard error must be `stderr` (None: anything), within `timeout` seconds. `options`
    are the interpreter's.
    """

    def run(source: str, *arguments: str, timeout: float = 30, status: int | None = 0, stderr: str | None = "",
            warnings: str = "error", options: tuple[str, ...] = ()):
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(source))
        finished = subprocess.run(
            [sys.executable, "-W", warnings, *options, str(script), *arguments], capture_output=True, text=True,
            timeout=timeout * SLOWDOWN,
            env={**child_environment(), "PYTHONFAULTHANDLER": "1"})
        if stderr is not None:
            assert finished.stderr == stderr
        if status is not None:
            assert finished.returncode == status, (finished.stdout, finished.stderr)
        return finished

    return run


def on_threads(*functions) -> list:
    """What the functions return, each on a thread of its own, or the first exception."""
    results: list = [None] * len(functions)
    errors: list[BaseException] = []

    def call(number: int, function) -> None:
        try:
            results[number] = function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=item, daemon=True) for item in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def run_threaded(function, num_threads: int) -> list:
    """Call ``function(number)`` on as many threads at once as possible; their results, or the first exception."""
    barrier = threading.Barrier(num_threads)

    def call(number: int):
        barrier.wait()
        return function(number)

    return on_threads(*(partial(call, number) for number in range(num_threads)))
