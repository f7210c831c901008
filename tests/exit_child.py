"""The child process of ``exit_matrix.py``: ``exit_child.py SITUATION ENDING`` brings the workers of a loader into the
situation, says "ready" and the time on standard output once they are in it, and then ends in that way. What the words
mean is explained there. Knows nothing of what is expected of it."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
import time
import warnings

from forked import wait_for
from tasks import statuses_of_workers
from toy_datasets import PATIENCE, Ids

from dataloader_rs import PyDataloader

# A shell that runs the tests in the background has SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
warnings.filterwarnings("ignore", "This process", DeprecationWarning)  # fork with threads, what two endings are about

BATCH_SIZE = 2
EXPECTED = [[first, first + 1] for first in range(0, 24, BATCH_SIZE)]

process = os.getpid()
entered = threading.Semaphore(0)  # counts those who have come to be held
inside_next = threading.Event()


def say(*words: object) -> None:
    """A line on standard output, at once."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def parked_workers() -> int:
    """How many workers wait for work: they have Ctrl-C blocked then, and only then."""
    return sum(int(status["SigBlk"], 16) >> signal.SIGINT - 1 & 1 for status in statuses_of_workers().values())


class Order:
    """The batches, in order. It is drawn from inside next(), and tells so from when `announces` is set."""

    announces = False

    def __iter__(self):
        for batch in EXPECTED:
            if self.announces:
                inside_next.set()
            yield batch


# ---- situations ----


class Idle(Ids):
    """All that may be fetched ahead is there, and the workers wait; nobody is held but who has taken a batch."""

    num_workers = 2
    collate_fn = None

    def __init__(self) -> None:
        super().__init__(len(EXPECTED) * BATCH_SIZE)
        self.released = threading.Event()

    def wait_until_reached(self, consuming: bool) -> None:
        if consuming and not entered.acquire(timeout=PATIENCE):
            raise TimeoutError("the consumer has taken no batch")
        deadline = time.monotonic() + PATIENCE
        while parked_workers() != self.num_workers:
            if time.monotonic() > deadline:
                raise TimeoutError("the workers do not come to rest")
            time.sleep(0.001)

    def announce(self, consuming: bool) -> None:
        self.wait_until_reached(consuming)
        say("ready", time.monotonic())

    def between_batches(self) -> None:
        """What the consumer does with a batch."""
        self.hold()

    def hold(self) -> None:
        """Hold the calling thread until `let_go`; but not in a forked child."""
        if os.getpid() == process and not self.released.is_set():
            entered.release()
            self.wait()

    def wait(self) -> None:
        # CPython looks for signals before it begins to wait; one that comes just then is seen when it looks again.
        while not self.released.wait(0.05):
            pass

    def let_go(self) -> None:
        self.released.set()


class InPython(Idle):
    """Both workers are in a loop in Python, inside ``__getitem__``, for all batches but the first."""

    is_released = False

    def wait_until_reached(self, consuming: bool) -> None:
        for _ in range(self.num_workers):
            if not entered.acquire(timeout=PATIENCE):
                raise TimeoutError("the workers do not come to be held")
        if consuming and not inside_next.wait(PATIENCE):
            raise TimeoutError("the consumer is not inside next()")

    def between_batches(self) -> None:
        pass

    def __getitem__(self, index: int) -> int:
        if index >= BATCH_SIZE:
            self.hold()
        return index

    def wait(self) -> None:
        while not self.is_released:
            pass

    def let_go(self) -> None:
        super().let_go()
        self.is_released = True


class NoWorker(InPython):
    """Without workers, an epoch that was begun; whoever consumes is held by ``__getitem__``, in a loop in Python."""

    num_workers = 0

    def wait_until_reached(self, consuming: bool) -> None:
        if consuming and not entered.acquire(timeout=PATIENCE):
            raise TimeoutError("the consumer does not come to be held")


class InC(InPython):
    """Both workers are in a call of C that has released the GIL and does not return."""

    def __init__(self) -> None:
        super().__init__()
        self.end_to_read, self.end_to_write = os.pipe()

    def wait(self) -> None:
        select.select([self.end_to_read], [], [])

    def let_go(self) -> None:
        super().let_go()
        os.write(self.end_to_write, b"x")


class InCWithGIL(InPython):
    """The worker is in a call of C that holds the GIL, and is again in the next item.

    Once it is, no other thread runs Python (on free-threaded builds it keeps the world from being stopped). So the
    worker itself says "ready", out of C. What is held ends after so many seconds as the third argument says.
    """

    num_workers = 1

    def __init__(self) -> None:
        super().__init__()
        self.with_gil = ctypes.PyDLL(None)
        self.duration = int(1e6 * float(sys.argv[3]))
        self.announced = threading.Event()

    def announce(self, consuming: bool) -> None:
        self.wait_until_reached(consuming)
        # Or the process could end between the worker's coming here and its word.
        if not self.announced.wait(PATIENCE):
            raise TimeoutError("the worker does not come to be held")

    def wait(self) -> None:
        if not self.announced.is_set():
            ready = f"ready {time.monotonic()}\n".encode()
            self.with_gil.write(1, ready, len(ready))
            self.announced.set()
        self.with_gil.usleep(self.duration)


class InCollate(InPython):
    """Both workers are in `collate_fn` for all batches but the first, and sleep for a moment again and again: they
    ask for the interpreter at all times."""

    def __getitem__(self, index: int) -> int:
        return index

    def collate_fn(self, samples: list) -> list:
        if samples != EXPECTED[0]:
            self.hold()
        return samples

    def wait(self) -> None:
        while not self.is_released:
            time.sleep(0.0005)


class Inner(Ids):
    """What a nested loader loads: its workers hold, in a wait for a lock."""

    def __getitem__(self, index: int) -> int:
        if index == 1:
            dataset.hold()
        return index


class Nested(InPython):
    """Both workers wait inside ``__getitem__`` for a loader of their own, whose worker is held."""

    def __getitem__(self, index: int) -> int:
        if index >= BATCH_SIZE:
            assert sum(PyDataloader(Inner(4), 2, num_workers=1), []) == [0, 1, 2, 3]
        return index

    def wait(self) -> None:
        self.released.wait()


SITUATIONS = {"none": NoWorker, "idle": Idle, "python": InPython, "c": InC, "collate": InCollate, "nested": Nested,
              "c-with-gil": InCWithGIL}


# ---- endings ----


def consume() -> None:
    """Go on with the epoch, whose first batch was taken. It says so if all batches are right."""
    order.announces = True
    for expected, batch in zip(EXPECTED[1:], batches, strict=True):
        assert batch == expected, batch
        dataset.between_batches()
    say("complete")


def consume_and_announce() -> None:
    """Be the consumer in the main thread, while another says when the situation is reached."""
    threading.Thread(target=dataset.announce, args=(True,), daemon=True).start()
    consume()


def consume_beside_another() -> None:
    """The same with a second loader, whose one worker waits. It ends when the exit has begun to stop workers."""
    global beside
    beside = PyDataloader(Ids(1), num_workers=1)
    assert list(beside) == [[0]]
    consume_and_announce()


def consume_and_exit_on_sigterm() -> None:
    """The same where SIGTERM is a ``sys.exit(6)``, as servers have it."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(6))
    consume_beside_another()


def refuses(inherited) -> bool:
    """next() on an iterator of the parent: RuntimeError, without waiting."""
    try:
        next(inherited)
    except RuntimeError as error:
        return "fork" in str(error)
    return False


def fork(in_child) -> None:
    """A child that calls a function and exits with status 5."""
    child = os.fork()
    if child == 0:
        in_child()
        sys.exit(5)
    wait_for(child, status=5, patience=PATIENCE)


def iterate_in_child() -> None:
    assert refuses(batches)
    assert list(loader) == EXPECTED
    assert refuses(batches)


def fork_then_iterate() -> None:
    fork(iterate_in_child)
    dataset.let_go()
    consume()


def iterate_in_thread(daemon: bool) -> None:
    threading.Thread(target=consume, daemon=daemon).start()
    dataset.announce(True)
    if not daemon:
        threading.Thread(target=let_go_once_main_has_ended, daemon=True).start()


def let_go_once_main_has_ended() -> None:
    # The interpreter marks its main thread as ended before it waits for the others.
    while threading.main_thread().is_alive():
        time.sleep(0.001)
    dataset.let_go()


def raise_error() -> None:
    raise ValueError("mine")


def end(function, *arguments):
    """An ending that comes over a situation in which nobody consumes."""
    def begin() -> None:
        dataset.announce(False)
        function(*arguments)
    return begin


ENDINGS = {
    "end": end(lambda: None),
    "sys.exit": end(sys.exit, 3),
    "error": end(raise_error),
    "os._exit": end(os._exit, 4),
    "sigint": consume_and_announce,
    "sigint-beside": consume_beside_another,
    "sigterm": consume_and_announce,
    "sigterm-exit": consume_and_exit_on_sigterm,
    "fork-exit": end(fork, lambda: None),
    "fork-iterate": end(fork_then_iterate),
    "daemon": lambda: iterate_in_thread(True),
    "next": lambda: iterate_in_thread(False),
}

situation, ending = sys.argv[1:3]
say("started", time.process_time())
dataset = SITUATIONS[situation]()
order = Order()
loader = PyDataloader(dataset, batch_sampler=order, num_workers=dataset.num_workers, collate_fn=dataset.collate_fn)
batches = iter(loader)
assert next(batches) == EXPECTED[0]
ENDINGS[ending]()
