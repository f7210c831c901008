"""The end of the interpreter, Ctrl-C and other signals. Exits are watched from outside, in child processes."""

from __future__ import annotations

import signal
import textwrap
import time

import pytest
from toy_datasets import GatedDataset

from dataloader_rs import PyDataloader

# A second for workers that are inside Python, and what a busy machine takes for the rest.
PROMPT = 3.0

# (num_workers, items_in_parallel)
SIZES = [(4, 1), (2, 3), (0, 3)]

PREAMBLE = """
import os, signal, sys, threading, time
from dataloader_rs import PyDataloader
from toy_datasets import GatedDataset, Ids

# A shell that runs the tests in the background has SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
num_workers, items_in_parallel = map(int, sys.argv[1:3])

class Sleeping(Ids):
    def __init__(self, length, seconds):
        super().__init__(length)
        self.seconds = seconds
        self.entered = threading.Event()
    def __getitem__(self, index):
        self.entered.set()
        time.sleep(self.seconds(index))
        return index

class Busy(Ids):
    def __getitem__(self, index):
        end = time.monotonic() + 0.02
        while time.monotonic() < end:
            pass
        return index

def load(dataset, batch_size=4, **arguments):
    return PyDataloader(dataset, batch_size, num_workers=num_workers, items_in_parallel=items_in_parallel, **arguments)

def interrupt_when(ready):
    # A signal sent to the process from another thread, as Ctrl-C sends it.
    def send():
        ready()
        global sent
        sent = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=send, daemon=True).start()
"""

AT_EXIT = {
    "busy": """
        loader = load(Busy(10**6))
        batches = iter(loader)
        next(batches)
        """,
    "idle": """
        loader = load(Ids(1000))
        batches = iter(loader)
        next(batches)
        time.sleep(0.05)
        """,
    "ended": """
        loader = load(Ids(100))
        list(loader)
        """,
    "stuck": """
        dataset = Sleeping(1000, lambda index: 60)
        loader = load(dataset)
        batches = iter(loader)
        if num_workers == 0:
            threading.Thread(target=next, args=(batches,), daemon=True).start()
        dataset.entered.wait()
        """,
    "daemons": """
        def consume():
            while True:
                for batch in load(Ids(1000)):
                    started.set()
        def wait():
            next(iter(load(Sleeping(1000, lambda index: 60))))
        started = threading.Event()
        for target in (consume, consume, wait):
            threading.Thread(target=target, daemon=True).start()
        started.wait()
        """,
    "cycle": """
        holder = [iter(load(Busy(10**6)))]
        holder.append(holder)
        next(holder[0])
        del holder
        """,
}

END = """
print(time.monotonic(), flush=True)
"""


def script(*parts: str) -> str:
    """One source of several, each with an indentation of its own."""
    return "\n".join(textwrap.dedent(part) for part in parts)


def seconds_to_exit(run_script, source: str, size: tuple[int, int], **expected) -> float:
    """Run a script whose last line of output is the monotonic time (it is the same in all processes) of its end."""
    finished = run_script(source, *map(str, size), **expected)
    return time.monotonic() - float(finished.stdout.splitlines()[-1])


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("situation", AT_EXIT)
def test_interpreter_exit_is_silent_and_prompt(run_script, situation, size):
    """The script ends whatever its workers are at: status 0, nothing on stderr, no wait for what is stuck."""
    assert seconds_to_exit(run_script, script(PREAMBLE, AT_EXIT[situation], END), size) < PROMPT


def test_uncaught_error_of_a_dataset_prints_its_traceback_only(run_script):
    """An error out of next() that nobody catches: one traceback with the dataset's line, and the note."""
    source = script(PREAMBLE, """
        class Bad(Busy):
            def __getitem__(self, index):
                if index == 9:
                    raise ValueError("bad sample")  # here
                return super().__getitem__(index)
        for batch in load(Bad(100)):
            pass
        """)
    finished = run_script(source, "2", "1", status=1, stderr=None)
    assert finished.stderr.count("Traceback") == 1
    assert 'raise ValueError("bad sample")  # here' in finished.stderr
    assert "Exception ignored" not in finished.stderr and "Fatal" not in finished.stderr


def test_ctrl_c_at_exit_ends_the_wait_for_stuck_workers(run_script):
    """The second that exit gives to workers inside Python is cut short by Ctrl-C, in silence."""
    source = script("""
        import atexit, time
        atexit.register(lambda: print(time.monotonic() - sent, flush=True))  # runs after the loader's own
        """, PREAMBLE, AT_EXIT["stuck"], """
        interrupt_when(lambda: time.sleep(0.2))
        """)
    assert float(run_script(source, "2", "1").stdout) < 0.5


def test_no_loader_starts_once_the_process_exits(run_script):
    """A loader that is iterated by a late exit handler raises RuntimeError, and does not hang."""
    source = script("""
        import atexit
        def late():
            try:
                list(PyDataloader(Ids(8), 2, num_workers=2))
            except RuntimeError as error:
                print(error)
            print(list(PyDataloader(Ids(4), 2)))
        atexit.register(late)
        """, PREAMBLE)
    printed = run_script(source, "2", "1").stdout.splitlines()
    assert "exiting" in printed[0]
    assert printed[1] == "[[0, 1], [2, 3]]"


INTERRUPTED = """
    try:
        for batch in loader:
            pass
    except KeyboardInterrupt:
        print(time.monotonic() - sent, flush=True)
    else:
        raise AssertionError("not interrupted")
"""


@pytest.mark.parametrize("size", [(4, 1), (2, 3)], ids=str)
def test_ctrl_c_interrupts_a_waiting_loop(run_script, size):
    """B11 (a): KeyboardInterrupt comes out of next() within 0.5 s, and the loader runs a further epoch."""
    source = script(PREAMBLE, """
        dataset = Sleeping(400, lambda index: 0.05)
        loader = load(dataset)
        interrupt_when(lambda: dataset.entered.wait() and time.sleep(0.2))
        """, INTERRUPTED, """
        dataset.seconds = lambda index: 0
        assert sum(loader, []) == list(range(400))
        """, END)
    finished = run_script(source, *map(str, size))
    assert float(finished.stdout.splitlines()[0]) < 0.5


@pytest.mark.parametrize("consume", ["list(loader)", "deque(loader, maxlen=0)"])
@pytest.mark.parametrize("seconds", [0, 0.001])
def test_ctrl_c_interrupts_a_loop_that_is_no_python_code(run_script, consume, seconds):
    """Nobody looks for signals inside list() but the iterator: when it waits, and when it need not."""
    source = script(PREAMBLE, f"""
        from collections import deque
        loader = load(Sleeping(10**6, lambda index: {seconds}), 1)
        interrupt_when(lambda: time.sleep(0.3))
        try:
            {consume}
        except KeyboardInterrupt:
            print(time.monotonic() - sent, flush=True)
        """, END)
    finished = run_script(source, "2", "1")
    assert float(finished.stdout.splitlines()[0]) < 0.5


def test_uncaught_error_is_shown_without_an_import(run_script):
    """CPython 3.13 and newer print it in Python. To import that beside busy workers took 0.5 s, and 10 s on 3.13t on a
    busy machine."""
    finished = run_script("""
        import atexit, sys
        from dataloader_rs import PyDataloader, PyDatasetBase

        class Numbers(PyDatasetBase):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                return index

        assert list(PyDataloader(Numbers(), num_workers=1)) == [[0], [1], [2], [3]]
        imported = set(sys.modules)
        atexit.register(lambda: print(sorted(set(sys.modules) - imported)))
        len(PyDataloader) + 1
        """, status=1, stderr=None)
    assert finished.stderr.startswith("Traceback (most recent call last):\n")
    assert "TypeError: " in finished.stderr
    assert finished.stdout == "[]\n"


@pytest.mark.parametrize("size", [(4, 1), (2, 3)], ids=str)
def test_ctrl_c_interrupts_a_wait_for_a_stuck_item(run_script, size):
    """B11 (b): the same while a sample blocks for 60 s, and the process ends within 3 s."""
    source = script(PREAMBLE, """
        loader = load(Sleeping(400, lambda index: 60 if index == 20 else 0))
        interrupt_when(lambda: time.sleep(0.3))
        """, INTERRUPTED, END)
    finished = run_script(source, *map(str, size))
    assert time.monotonic() - float(finished.stdout.splitlines()[1]) < PROMPT
    assert float(finished.stdout.splitlines()[0]) < 0.5


def test_ctrl_c_without_workers_is_raised_inside_user_code(run_script):
    """With 0 workers the dataset itself sees KeyboardInterrupt; its batch counts as failed, the next one follows."""
    source = script(PREAMBLE, """
        class Interrupted(Ids):
            def __getitem__(self, index):
                if index == 2:
                    try:
                        os.kill(os.getpid(), signal.SIGINT)
                        time.sleep(20)
                    except KeyboardInterrupt:
                        print("inside")
                        raise
                return index
        batches = iter(load(Interrupted(6), 2))
        print(next(batches), len(batches))
        try:
            next(batches)
        except KeyboardInterrupt as error:
            print("outside", error.__notes__)
        print(len(batches), list(batches))
        """)
    note = "dataloader_rs: raised for index 2 (position 0 of batch 1), in the calling thread"
    assert run_script(source, "0", "1").stdout.splitlines() == [
        "[0, 1] 2", "inside", f"outside [{note!r}]", "1 [[4, 5]]"]


def test_ctrl_c_with_own_threads_waits_for_the_batch(run_script):
    """With 0 workers and parallel items the batch runs to its end, and the next() after the interrupt delivers it."""
    source = script(PREAMBLE, """
        dataset = GatedDataset(9, closed={4})
        batches = iter(load(dataset, 3))
        print(next(batches))
        def send():
            dataset.wait_until_started({4})
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
            print("opened", flush=True)
            dataset.open()
        threading.Thread(target=send).start()
        try:
            next(batches)
        except KeyboardInterrupt:
            print("interrupted", len(batches), dataset.running, sorted(dataset.started))
        print(list(batches))
        """)
    assert run_script(source, "0", "3").stdout.splitlines() == [
        "[0, 1, 2]", "opened", "interrupted 2 0 [0, 1, 2, 3, 4, 5]", "[[3, 4, 5], [6, 7, 8]]"]


class Alarm(Exception):
    """What the signal handler of a test raises."""


@pytest.fixture
def alarm():
    """``alarm(action, seconds)``: call `action` in a signal handler after so long; list of the times it was."""
    times: list[float] = []

    def set_timer(action, seconds: float) -> list[float]:
        def handler(number, frame) -> None:
            times.append(time.monotonic())
            action()

        times.clear()
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        return times

    before = signal.getsignal(signal.SIGALRM)
    yield set_timer
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def raise_alarm() -> None:
    raise Alarm


@pytest.mark.parametrize(("num_workers", "items_in_parallel"), [(1, 1), (4, 1), (1, 3), (4, 3)])
def test_signal_interrupts_a_waiting_next(alarm, num_workers, items_in_parallel):
    """What a signal handler raises comes out of a waiting next() within 100 ms, and the iterator goes on."""
    dataset = GatedDataset(6, closed={2})
    batches = iter(PyDataloader(dataset, 2, num_workers=num_workers, items_in_parallel=items_in_parallel))
    assert next(batches) == [0, 1]
    delays = []
    for _ in range(4):
        due = time.monotonic() + 0.01
        alarm(raise_alarm, 0.01)
        with pytest.raises(Alarm):
            next(batches)
        delays.append(time.monotonic() - due)
    assert min(delays) < 0.1, delays
    assert len(batches) == 2
    dataset.open()
    assert list(batches) == [[2, 3], [4, 5]]


@pytest.mark.parametrize(("num_workers", "items_in_parallel"), [(0, 3), (1, 1), (4, 1), (4, 3)])
def test_signal_handler_runs_during_a_wait(alarm, num_workers, items_in_parallel):
    """A handler that raises nothing runs while next() waits (it opens the gate here), and next() delivers."""
    dataset = GatedDataset(4, closed={0})
    batches = iter(PyDataloader(dataset, 2, num_workers=num_workers, items_in_parallel=items_in_parallel))
    times = alarm(dataset.open, 0.05)
    assert next(batches) == [0, 1]
    assert len(times) == 1
    assert list(batches) == [[2, 3]]
