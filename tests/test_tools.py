"""Tools that people attach to a process: what they are to see of workers. Those that are not installed are skipped."""

from __future__ import annotations

import cProfile
import os
import pstats
import re
import shutil
import subprocess
import sys
import sysconfig
import threading

import pytest
from conftest import FREE_THREADED, child_environment
from toy_datasets import PATIENCE, Calls

from dataloader_rs import PyDataloader

pytestmark = pytest.mark.slow

# One worker inside an item, one that waits for work; the main thread waits for the first.
STUCK = """
    import faulthandler, sys, threading
    from conftest import eventually, is_parked
    from dataloader_rs import PyDataloader, PyDataset

    class Slow(PyDataset):
        def __len__(self):
            return 2
        def __getitem__(self, index):
            if index == 0:
                return self.wait_for_a_server(index)
            return index
        def wait_for_a_server(self, index):
            begun.set()
            gate.wait(60)
            return index

    begun, gate = threading.Event(), threading.Event()
    loader = PyDataloader(Slow(), num_workers=2, adaptive=False)
    batches = iter(loader)
    begun.wait(60)
    workers = []
    def both_have_started():
        workers[:] = [thread for thread in threading.enumerate() if thread.name.startswith("dlrs-")]
        return len(workers) == 2
    assert eventually(both_have_started)
"""

ATTACHED = STUCK + """
    def ask():
        # Not before the main thread waits, as near as can be told.
        print("ready", flush=True)
        sys.stdin.read()
        gate.set()

    threading.Thread(target=ask, name="asks").start()
    assert next(batches) == [0]
"""


@pytest.fixture
def stuck(tmp_path):
    """A process with a worker that is stuck in an item. It ends well afterwards."""
    script = tmp_path / "script.py"
    script.write_text("\n".join(line.removeprefix("    ") for line in ATTACHED.splitlines()))
    with subprocess.Popen(
            [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=child_environment()) as process:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        yield process
        out, err = process.communicate(timeout=30)
    assert (out, err, process.returncode) == ("", "", 0)


def attach(*command: str) -> str:
    """What a tool prints that looks at another process; skips where the system does not let it."""
    finished = subprocess.run(command, capture_output=True, text=True, timeout=50)
    text = finished.stdout + finished.stderr
    if re.search(r"[Pp]ermission [Dd]enied|Operation not permitted|ptrace: ", text):
        pytest.skip(f"{command[0]} may not look at other processes here: {text.splitlines()[-1]}")
    assert finished.returncode == 0, text
    return text


def test_py_spy_shows_where_workers_are(stuck):
    """``py-spy dump`` has the name of a worker, and the function of the dataset that it is in."""
    if FREE_THREADED:
        pytest.skip("py-spy 0.4 does not know free-threaded builds")
    if sys.version_info >= (3, 14):
        pytest.skip("py-spy 0.4 knows CPython up to 3.13")
    py_spy = shutil.which("py-spy", path=sysconfig.get_path("scripts")) or shutil.which("py-spy")
    if py_spy is None:
        pytest.skip("py-spy is not installed")
    threads = re.split(r"(?m)^Thread ", attach(py_spy, "dump", "--pid", str(stuck.pid)))
    inside = [thread for thread in threads if "wait_for_a_server" in thread]
    assert len(inside) == 1 and '"dlrs-' in inside[0] and "Slow.__getitem__" in inside[0], threads
    assert sum('"dlrs-' in thread for thread in threads) == 2, threads


def test_gdb_shows_functions_by_name(stuck):
    """``gdb -batch -ex "thread apply all bt"`` on an ordinary build names our C functions in each thread."""
    if shutil.which("gdb") is None:
        pytest.skip("gdb is not installed")
    text = attach("gdb", "-batch", "-nx", "-iex", "set debuginfod enabled off", "-ex", "thread apply all bt",
                  "-p", str(stuck.pid))
    threads = re.split(r"(?m)^Thread ", text)
    workers = [thread for thread in threads if '"dlrs-' in thread.partition("\n")[0]]
    assert len(workers) == 2 and all(" worker_main (" in worker for worker in workers), text
    busy = [worker for worker in workers if "make_item" in worker or "make_batch" in worker]
    assert len(busy) == 1 and "_core" in busy[0], text
    (main,) = [thread for thread in threads if f"(LWP {stuck.pid})" in thread.partition("\n")[0]]
    assert " dlrs_epoch_wait (" in main and "__next__" in main, main


def test_faulthandler_shows_where_workers_are(run_script):
    """``faulthandler.dump_traceback`` shows the frames of a worker that is stuck, and that others have none."""
    printed = run_script(STUCK + """
    assert eventually(lambda: sum(is_parked(worker.native_id) for worker in workers) == 1)
    faulthandler.dump_traceback(all_threads=True)
    gate.set()
    assert list(batches) == [[0], [1]]
    """, stderr=None).stderr
    threads = re.split(r"(?m)^(?=Thread |Current thread )", printed)[1:]
    inside = [thread for thread in threads if "wait_for_a_server" in thread and "__getitem__" in thread]
    assert len(inside) == 1 and threads[-1].startswith("Current thread"), printed
    assert "in <module>" not in inside[0]


def test_dumps_do_not_disturb_workers_that_run(run_script):
    """``faulthandler.dump_traceback`` of worker threads that come, run and go meanwhile is harmless."""
    if FREE_THREADED:
        pytest.skip("faulthandler looks at running threads without stopping them, which is not safe without the GIL")
    run_script("""
    import faulthandler, os
    from dataloader_rs import PyDataloader
    from toy_datasets import Ids
    with open(os.devnull, "w") as nowhere:
        for _ in range(50):
            batches = iter(PyDataloader(Ids(64), 4, num_workers=4))
            for batch in batches:
                faulthandler.dump_traceback(nowhere, all_threads=True)
    """)


TRACED = """
    import sys
    from dataloader_rs import PyDataloader, PyDataset, PyIterableDataset

    class Items(PyDataset):
        def __len__(self):
            return 20
        def __getitem__(self, index):
            return index + 1  # item

    class Stream(PyIterableDataset):
        def __iter__(self):
            for number in range(20):
                yield number  # stream

    def collate(samples):
        return sum(samples)  # collate

    def start(worker):
        return worker  # start

    num_workers, items_in_parallel = map(int, sys.argv[1:])
    loader = PyDataloader(Items(), 4, num_workers=num_workers, collate_fn=collate, worker_init_fn=start,
                          items_in_parallel=items_in_parallel)
    assert list(loader) == [10, 26, 42, 58, 74]
    stream = PyDataloader(Stream(), 4, num_workers=num_workers, collate_fn=collate)
    assert list(stream) == [6, 22, 38, 54, 70]
    loader.close()
    stream.close()
"""


@pytest.mark.parametrize("core", ["ctrace", "pytrace", "sysmon"])
@pytest.mark.parametrize(("num_workers", "items_in_parallel"), [(0, 1), (2, 1), (1, 2)])
def test_coverage_sees_what_workers_run(tmp_path, core, num_workers, items_in_parallel):
    """coverage.py, as it comes, counts the lines of items, streams, collate_fn and worker_init_fn as run."""
    coverage = pytest.importorskip("coverage", reason="coverage is not installed")
    if core == "sysmon" and sys.version_info < (3, 12):
        pytest.skip("sys.monitoring is new in 3.12")
    if core == "ctrace":
        pytest.importorskip("coverage.tracer", reason="coverage has no C tracer here")
    script, data = tmp_path / "script.py", tmp_path / "data"
    script.write_text("\n".join(line.removeprefix("    ") for line in TRACED.splitlines()))
    environment = {**os.environ, "COVERAGE_CORE": core, "COVERAGE_FILE": str(data), "COVERAGE_RCFILE": os.devnull}
    ran = subprocess.run([sys.executable, "-m", "coverage", "run", script, str(num_workers), str(items_in_parallel)],
                         cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=50)
    assert ran.returncode == 0 and not ran.stdout + ran.stderr, ran.stdout + ran.stderr
    found = coverage.CoverageData(str(data))
    found.read()
    (file,) = (name for name in found.measured_files() if name.endswith("script.py"))
    run = set(found.lines(file))
    lines = {line.rpartition("# ")[2]: number for number, line in enumerate(script.read_text().splitlines(), 1)
             if "  # " in line}
    assert {"item", "stream", "collate", "start"} == set(lines)
    expected = set(lines) - ({"start"} if num_workers == 0 else set())
    assert {what for what, number in lines.items() if number in run} == expected


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is new in 3.12")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_monitoring_sees_what_workers_run(num_workers):
    """sys.monitoring, which is for all threads of the process, gets the events of workers, on those workers."""
    monitoring = sys.monitoring
    found = set()

    def item(index: int) -> int:
        return threading.get_ident()

    def on_start(code, offset):
        if code is item.__code__:
            found.add(threading.get_ident())

    monitoring.use_tool_id(monitoring.PROFILER_ID, "test")
    try:
        monitoring.register_callback(monitoring.PROFILER_ID, monitoring.events.PY_START, on_start)
        monitoring.set_events(monitoring.PROFILER_ID, monitoring.events.PY_START)
        ran = set(sum(PyDataloader(Calls(40, item), 2, num_workers=num_workers), []))
    finally:
        monitoring.set_events(monitoring.PROFILER_ID, 0)
        monitoring.register_callback(monitoring.PROFILER_ID, monitoring.events.PY_START, None)
        monitoring.free_tool_id(monitoring.PROFILER_ID)
    assert found == ran


def thread_of_item(index: int) -> int:
    return threading.get_ident()


def tracer_of(function):
    """A set, and a trace function that adds to it each thread on which the function runs."""
    traced = set()

    def trace(frame, event, argument):
        if frame.f_code is function.__code__:
            traced.add(threading.get_ident())

    return traced, trace


def test_trace_set_later_is_for_workers_that_start_later():
    """threading.settrace is for threads that start after it: workers that have had work are left alone."""
    traced, trace = tracer_of(thread_of_item)
    both_work = threading.Barrier(2)

    def item(index: int) -> int:
        if index in {0, 2}:
            both_work.wait(PATIENCE)
        return thread_of_item(index)

    early, late = (PyDataloader(Calls(20, item), 2, num_workers=2) for _ in range(2))
    workers = set(sum(early, []))
    before = threading.gettrace()
    threading.settrace(trace)
    try:
        workers |= set(sum(early, []))
        new = set(sum(late, []))
    finally:
        threading.settrace(before)
    assert len(workers) == len(new) == 2
    assert traced == new and not traced & workers


@pytest.mark.skipif(sys.version_info < (3, 12), reason="threading.settrace_all_threads is new in 3.12")
@pytest.mark.skipif(FREE_THREADED, reason="CPython 3.13t sets it while the other threads run")
def test_trace_can_be_set_for_workers_that_run():
    """threading.settrace_all_threads reaches workers that are parked, and takes the function away from them again."""
    traced, trace = tracer_of(thread_of_item)
    loader = PyDataloader(Calls(20, thread_of_item), 2, num_workers=2)
    list(loader)
    before, of_this_thread = threading.gettrace(), sys.gettrace()
    threading.settrace_all_threads(trace)
    try:
        workers = set(sum(loader, []))
    finally:
        threading.settrace_all_threads(None)
        threading.settrace(before)
        sys.settrace(of_this_thread)
    assert traced == workers
    traced.clear()
    list(loader)
    assert not traced


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.skipif(
    FREE_THREADED and sys.version_info < (3, 15),
    reason="cProfile crashes where two threads of any kind run, python/cpython#125165"))])
def test_profile_of_the_main_thread_has_the_main_thread(num_workers):
    """cProfile counts each next() of the loop once. It counts no calls of workers, where it is for one thread.

    From 3.12 on cProfile is built on sys.monitoring and counts the calls of all threads.
    """
    if sys.getprofile() is not None:
        pytest.skip("another profiler is on")

    def item(index: int) -> int:
        return index

    loader = PyDataloader(Calls(40, item), 2, num_workers=num_workers)
    list(loader)
    profile = cProfile.Profile()
    try:
        profile.enable()
    except ValueError:
        pytest.skip("another profiler is on")
    try:
        batches = iter(loader)
        while next(batches, None) is not None:
            pass
    finally:
        profile.disable()
    calls = {name: counts[0] for (_, _, name), counts in pstats.Stats(profile).stats.items()}
    assert calls["<built-in method builtins.next>"] == 21
    if num_workers == 0 or sys.version_info < (3, 12):
        assert calls.get("item", 0) == (0 if num_workers else 40)
