"""fork() while workers exist: the child builds threads of its own, and the parent goes on. Child processes that a
dataset starts get an ordinary signal mask."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading

import pytest
from conftest import blocked_signals, eventually, worker_threads
from toy_datasets import GatedDataset, Ids

from dataloader_rs import PyDataloader

pytestmark = pytest.mark.slow

PREAMBLE = """
import faulthandler, gc, multiprocessing, os, signal, sys, threading, time, warnings
from dataloader_rs import PyDataloader
from forked import wait_for
from tasks import statuses_of_workers
from toy_datasets import Ids

warnings.filterwarnings("ignore", "This process", DeprecationWarning)  # fork with threads, what this is about
num_workers, items_in_parallel = map(int, sys.argv[1:3])

class Busy(Ids):
    def __getitem__(self, index):
        end = time.monotonic() + 0.0003
        while time.monotonic() < end:
            pass
        return index

has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()

def load(dataset, batch_size=4, num_workers=num_workers):
    return PyDataloader(dataset, batch_size, num_workers=num_workers, items_in_parallel=items_in_parallel)

def complete(loader):
    # Also for multiprocessing: a module-level function.
    return sum(loader, []) == list(range(len(loader.dataset)))

def num_worker_threads():
    return len(statuses_of_workers())

def has_worker_threads(number, patience=5):
    # A thread gets its name a moment after it was made.
    deadline = time.monotonic() + patience
    while num_worker_threads() != number and time.monotonic() < deadline:
        time.sleep(0.001)
    return num_worker_threads() == number

def fork(loaders=1):
    # Free-threaded Python can deadlock by itself in the child's half of os.fork() if another thread starts or ends
    # meanwhile (3.13t: the lock of the dict that threading keeps its own locals in). So there all workers are up first.
    threads = loaders * (max(num_workers, 1) * items_in_parallel if num_workers or items_in_parallel > 1 else 0)
    if not has_gil:
        while (sum(thread.name.startswith("dlrs-") for thread in threading.enumerate()) != threads
               or num_worker_threads() != threads):
            time.sleep(0.001)
    return os.fork()

def another_thread_acquires(lock):
    acquired = []
    thread = threading.Thread(target=lambda: acquired.append(lock.acquire(timeout=5)))
    thread.start()
    thread.join()
    return acquired == [True]

def refuses(batches):
    # next() on an iterator of the parent: RuntimeError, without waiting. "Under way": the parent was inside next().
    start = time.monotonic()
    try:
        next(batches)
    except RuntimeError as error:
        return ("fork" in str(error) or "under way" in str(error)) and time.monotonic() - start < 1
    return False
"""

SIZES = [(2, 1), (2, 3), (0, 1), (0, 3)]


@pytest.fixture
def run_forking(run_script):
    """Run a script after the preamble with so many workers and parallel items; nothing may come on stderr."""

    def run(source: str, size: tuple[int, int]):
        return run_script(PREAMBLE + textwrap.dedent(source), *map(str, size), timeout=50)

    return run


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_forked_child_loads_and_parent_goes_on(run_forking, size):
    """B15: 20 forks with busy workers: in the child new loaders work, and the iterator taken over raises."""
    run_forking("""
        for _ in range(20):
            loader = load(Busy(64))
            batches = iter(loader)
            taken = [next(batches) for _ in range(3)]
            child = fork()
            if child == 0:
                assert complete(load(Ids(64), num_workers=0))
                assert complete(load(Ids(64), num_workers=2))
                assert refuses(batches) and refuses(batches)
                assert complete(loader)
                del batches, loader
                gc.collect()
                sys.exit(0)
            assert sum(taken + list(batches), []) == list(range(64))
            wait_for(child)
            del batches, loader
        """, size)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_child_that_touches_nothing_exits_normally(run_forking, size):
    """A child that inherits a loader in mid-epoch and ignores it leaves in silence, through its exit handlers."""
    run_forking("""
        loader = load(Busy(64))
        batches = iter(loader)
        next(batches)
        child = fork()
        if child == 0:
            sys.exit(0)
        wait_for(child)
        assert len(list(batches)) == 15
        """, size)


@pytest.mark.parametrize("size", [(2, 1), (2, 3), (0, 1)], ids=str)
def test_child_drops_and_closes_what_it_took_over(run_forking, size):
    """Closing, dropping and collecting the parent's loader and iterators in the child waits for nothing."""
    run_forking("""
        loader = load(Busy(64))
        batches, finished, cycle = iter(loader), iter(loader), [iter(loader)]
        cycle.append(cycle)
        list(finished)
        child = fork()
        if child == 0:
            start = time.monotonic()
            loader.close()
            assert next(finished, None) is None
            del batches, finished, cycle, loader
            gc.collect()
            assert time.monotonic() - start < 2
            sys.exit(0)
        wait_for(child)
        assert complete(loader)
        """, size)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_grandchild_loads(run_forking, size):
    """A child that uses the loader forks in turn: its child can use it as well."""
    run_forking("""
        loader = load(Busy(64))
        oldest = iter(loader)
        next(oldest)
        child = fork()
        if child == 0:
            older = iter(loader)
            next(older)
            grandchild = fork()
            if grandchild == 0:
                assert refuses(older) and refuses(oldest) and complete(loader)
                sys.exit(0)
            wait_for(grandchild)
            assert refuses(oldest) and len(list(older)) == 15
            sys.exit(0)
        wait_for(child)
        assert len(list(oldest)) == 15
        """, size)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_multiprocessing_fork_loads(run_forking, size):
    """A Process and a Pool with the fork method use a loader that their parent already iterated."""
    run_forking("""
        fork = multiprocessing.get_context("fork")
        loader = load(Busy(64))
        batches = iter(loader)
        next(batches)

        def task(number):
            return complete(loader) and refuses(batches)

        def target():
            sys.exit(0 if task(0) else 1)

        process = fork.Process(target=target)
        process.start()
        process.join(15)
        assert process.exitcode == 0, process.exitcode
        with fork.Pool(2) as pool:
            assert pool.map_async(task, range(6)).get(20) == [True] * 6
            pool.close()
            pool.join()
        assert len(list(batches)) == 15
        """, size)


@pytest.mark.parametrize("size", [(2, 1), (2, 3), (0, 3)], ids=str)
def test_worker_forks(run_forking, size):
    """A dataset that forks in ``__getitem__``: the child, which is a copy of the worker, can use every loader."""
    run_forking("""
        class Forks(Ids):
            def __getitem__(self, index):
                if index % 16 == 5:
                    child = fork(loaders=2)
                    if child == 0:
                        status = 1
                        try:
                            faulthandler.dump_traceback_later(10, exit=True)
                            if complete(load(Ids(20))) and complete(other) and refuses(batches):
                                status = 0
                        finally:
                            os._exit(status)
                    wait_for(child)
                return index

        other = load(Ids(30))
        assert complete(other)
        loader = load(Forks(64))
        batches = iter(loader)
        assert sum(batches, []) == list(range(64))
        """, size)


@pytest.mark.parametrize("size", [(2, 1), (2, 3), (0, 1)], ids=str)
def test_fork_while_another_thread_starts_epochs(run_forking, size):
    """A fork that meets another thread in iter(), or at the birth or end of a loader, leaves a child that loads."""
    run_forking("""
        shared = load(Ids(40))
        next(iter(shared))

        def iterate():
            while not done:
                if births:
                    assert complete(load(Ids(12)))
                next(iter(shared))

        births = getattr(sys, "_is_gil_enabled", lambda: True)()  # see fork()

        done = False
        other = threading.Thread(target=iterate)
        other.start()
        for _ in range(20):
            child = fork()
            if child == 0:
                assert complete(shared) and complete(load(Ids(12)))
                os._exit(0)
            wait_for(child)
            assert complete(shared)
        done = True
        other.join(10)
        assert not other.is_alive()
        """, size)


def test_forked_child_starts_its_threads_once(run_forking):
    """The child has no worker before its first epoch, and one pool of its own after several."""
    run_forking("""
        loader = load(Ids(64))
        list(loader)
        assert has_worker_threads(6)
        child = fork()
        if child == 0:
            assert num_worker_threads() == 0
            for _ in range(3):
                assert complete(loader)
            assert has_worker_threads(6)
            sys.exit(0)
        wait_for(child)
        assert complete(loader) and has_worker_threads(6)
        """, (2, 3))


def test_child_finds_no_lock_of_threading_held(run_forking):
    """From CPython 3.14 on, a thread that ends in the child goes through the lock that was there before the fork."""
    run_forking("""
        lock = threading._active_limbo_lock
        child = os.fork()
        if child == 0:
            assert another_thread_acquires(lock)
            sys.exit(0)
        wait_for(child)
        """, (2, 1))


@pytest.mark.skipif(sys.version_info < (3, 14), reason="threads that end go through the lock that threading has then")
def test_grandchild_finds_no_lock_of_threading_held(run_forking):
    """In a child, from CPython 3.14 on, threads that end go through the lock of the parent: a fork makes it anew."""
    run_forking("""
        lock = threading._active_limbo_lock
        child = os.fork()
        if child == 0:
            held = threading.Event()

            def hold():
                with lock:
                    held.set()
                    time.sleep(0.2)

            threading.Thread(target=hold).start()
            held.wait()
            grandchild = os.fork()
            if grandchild == 0:
                assert another_thread_acquires(lock)
                sys.exit(0)
            wait_for(grandchild)
            sys.exit(0)
        wait_for(child)
        """, (2, 1))


SLOW_WORKER = textwrap.dedent("""
    import _thread
    begun, forking = threading.Event(), _thread.allocate_lock()
    main, current_thread = threading.get_ident(), threading.current_thread

    def step():
        # What a worker calls to make itself known.
        if threading.get_ident() != main and not begun.is_set():
            begun.set()
            in_step()
        return current_thread()

    threading.current_thread = step
    """)


def test_fork_waits_for_a_worker_that_makes_itself_known(run_forking):
    """And signals that come meanwhile are handled after it. Parent and child load as after any other fork."""
    run_forking(SLOW_WORKER + textwrap.dedent("""
        handled, left = [], []

        def in_step():
            with forking:
                for _ in range(5):  # in a small part of the second that a fork waits, also on a busy machine
                    signal.pthread_kill(main, signal.SIGALRM)
                    time.sleep(0.005)
            left.append(len(handled))

        signal.signal(signal.SIGALRM, lambda *_: handled.append(left[:]))
        forking.acquire()
        os.register_at_fork(before=forking.release)  # a call of C, right before those of the loader
        loader = load(Ids(64))
        iterator = iter(loader)
        begun.wait()
        child = os.fork()
        assert left == [0]
        assert complete(load(Ids(64)))
        if child == 0:
            sys.exit(0)
        assert set(map(tuple, handled)) == {(0,)}
        assert sum(iterator, []) == list(range(64))
        wait_for(child)
        """), (2, 1))


def test_finalizer_may_load_while_a_worker_makes_itself_known(run_forking):
    """The collector may run one just then; its loader has workers that make themselves known. So may one that forks."""
    run_forking(SLOW_WORKER + textwrap.dedent("""
        def in_step():
            assert complete(load(Ids(64)))
            if not has_gil:
                return
            child = os.fork()
            assert complete(load(Ids(64)))
            if child == 0:
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0

        for _ in range(5):
            begun.clear()
            loader = load(Ids(64))
            assert complete(loader)
            loader.close()
        """), (2, 1))


def test_fork_waits_for_a_second_and_no_more(run_forking):
    """A finalizer that a worker runs while it makes itself known may ask for what the forking thread holds."""
    run_forking(SLOW_WORKER + textwrap.dedent("""
        forked = threading.Event()

        def in_step():
            assert forked.wait(30)

        loader = load(Ids(64))
        iterator = iter(loader)
        begun.wait()
        start = time.monotonic()
        child = os.fork()
        elapsed = time.monotonic() - start
        forked.set()
        if child == 0:
            assert not has_gil or complete(load(Ids(64)))
            os._exit(0)
        assert 0.5 < elapsed < 5, elapsed
        assert sum(iterator, []) == list(range(64))
        wait_for(child)
        """), (2, 1))


def test_hook_of_the_child_that_comes_first_may_load(run_script):
    """It was registered before the import of the loader, so it runs before what the loader does in the child."""
    run_script("""
        import os, sys, warnings
        import threading  # first: before its own hook has run in the child, no thread should start there

        def load():
            global iterator, whole
            iterator = iter(PyDataloader(Ids(64), 4, num_workers=2))
            whole = sum(PyDataloader(Ids(64), 4, num_workers=2), [])

        os.register_at_fork(after_in_child=load)
        from dataloader_rs import PyDataloader
        from forked import wait_for
        from toy_datasets import Ids
        warnings.filterwarnings("ignore", "This process", DeprecationWarning)
        for _ in range(5):
            child = os.fork()
            if child == 0:
                assert whole == sum(iterator, []) == list(range(64))
                sys.exit(0)
            wait_for(child)
        """)


SIGNAL_IN_A_FORK = """
    import ctypes, functools, os, signal, sys
    interrupt = functools.partial(getattr(ctypes.CDLL(None), "raise"), signal.SIGALRM)
    os.register_at_fork(before=interrupt)  # a call of C, right after those of the loader
    import threading, warnings
    from dataloader_rs import PyDataloader
    from toy_datasets import Ids
    warnings.filterwarnings("ignore", "This process", DeprecationWarning)

    class Late(BaseException):
        pass

    def handler(*_):
        raise Late

    signal.signal(signal.SIGALRM, handler)
    parent, forked = os.getpid(), False
    try:
        os.fork()
        forked = True
    except Late:
        pass
    assert forked == (os.getpid() != parent)  # CPython drops the signal in the child
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    loader = PyDataloader(Ids(8), 4, num_workers=1)
    assert list(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    loader.close()
    if os.getpid() != parent:
        sys.exit(0)
    assert os.wait()[1] == 0
"""


def test_signal_in_the_middle_of_a_fork_leaves_nothing_held(run_script):
    """Ctrl-C during os.fork() comes out of it, and parent and child go on loading."""
    run_script(SIGNAL_IN_A_FORK)


def test_fork_inside_threading(run_forking):
    """A signal handler or a finalizer that forks inside `threading`, where a worker wants to make itself known."""
    run_forking("""
        lock = threading._active_limbo_lock
        with lock:
            batches = iter(load(Ids(64)))
            assert has_worker_threads(2)
            child = os.fork()
            assert lock._is_owned()
        if child == 0:
            assert refuses(batches)
            assert complete(load(Ids(64)))
            sys.exit(0)
        wait_for(child)
        assert sum(batches, []) == list(range(64))
        """, (2, 1))


@pytest.mark.parametrize("when", ["before", "after_in_parent", "after_in_child"])
def test_fork_inside_a_fork(when, run_script):
    """A hook of a fork forks, with locks of the loader held or not: all processes load."""
    run_script("""
        import os, sys, warnings

        def fork():
            global is_inner
            if not is_inner:
                is_inner = True
                os.fork()

        is_inner = False
        os.register_at_fork(**{sys.argv[1]: fork})
        from dataloader_rs import PyDataloader
        from toy_datasets import Ids
        warnings.filterwarnings("ignore", "This process", DeprecationWarning)

        def load():
            loader = PyDataloader(Ids(8), 4, num_workers=1)
            assert list(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
            loader.close()

        load()
        os.fork()
        load()
        while True:
            try:
                assert os.wait()[1] == 0
            except ChildProcessError:
                break
        """, when)


@pytest.mark.parametrize("when", ["before", "after_in_parent", "after_in_child"])
def test_hook_of_a_fork_starts_and_joins_a_thread(when, run_script):
    """One that was registered before the import of the loader runs while that holds what it holds for the fork."""
    run_script("""
        import os, sys, threading, warnings

        def join():
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()

        os.register_at_fork(**{sys.argv[1]: join})
        from dataloader_rs import PyDataloader
        from toy_datasets import Ids
        warnings.filterwarnings("ignore", "This process", DeprecationWarning)
        child = os.fork()
        loader = PyDataloader(Ids(8), 4, num_workers=1)
        assert list(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        loader.close()
        if child:
            assert os.waitpid(child, 0)[1] == 0
        """, when)


def test_fork_while_another_thread_starts_threads_under_a_lock_that_forks_take(run_script):
    """As `concurrent.futures` does, whose lock a fork takes, too: neither waits for the other."""
    run_script("""
        import os, threading, warnings
        lock, held, forking = threading.Lock(), threading.Event(), threading.Event()
        os.register_at_fork(before=lambda: (forking.set(), lock.acquire()), after_in_parent=lock.release,
                            after_in_child=lock.release)
        import dataloader_rs
        warnings.filterwarnings("ignore", "This process", DeprecationWarning)

        def submit():
            with lock:
                held.set()
                forking.wait()
                threading.Thread(target=int).start()

        other = threading.Thread(target=submit)
        other.start()
        held.wait()
        child = os.fork()
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        other.join()
        """)


@pytest.mark.skipif(sys.version_info < (3, 14), reason="threads that end go through the lock that threading has then")
def test_import_in_a_child_whose_parent_was_inside_threading(run_script):
    """The lock that threads go through when they end may be held there by a thread that is not there."""
    run_script("""
        import os, sys, threading, warnings
        warnings.filterwarnings("ignore", "This process", DeprecationWarning)
        held = threading.Event()

        def hold():
            with threading._active_limbo_lock:
                held.set()
                threading.Event().wait()

        threading.Thread(target=hold, daemon=True).start()
        held.wait()
        child = os.fork()
        if child == 0:
            from dataloader_rs import PyDataloader
            from toy_datasets import Ids
            grandchild = os.fork()
            loader = PyDataloader(Ids(8), 4, num_workers=1)
            assert list(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
            loader.close()
            if grandchild:
                assert os.waitpid(grandchild, 0)[1] == 0
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        os._exit(0)
        """)


# ---- signals, as child processes and workers see them ----


@pytest.mark.parametrize(("num_workers", "items_in_parallel"), [(0, 1), (0, 3), (2, 1), (2, 3)])
def test_worker_terminates_a_child_process(num_workers, items_in_parallel):
    """A dataset can terminate() a process it started: the process does not inherit blocked signals."""

    class Runs(Ids):
        def __getitem__(self, index: int) -> int:
            with subprocess.Popen(["sleep", "60"]) as process:
                process.terminate()
                return process.wait(timeout=10)

    loader = PyDataloader(Runs(4), 2, num_workers=num_workers, items_in_parallel=items_in_parallel)
    assert list(loader) == [[-signal.SIGTERM] * 2] * 2


@pytest.mark.parametrize(("num_workers", "items_in_parallel"), [(2, 1), (2, 3), (0, 3)])
def test_user_code_runs_with_the_signals_of_who_started_the_workers(num_workers, items_in_parallel):
    """In ``__getitem__`` and ``collate_fn`` exactly the signals are blocked that the starting thread had blocked."""

    class Masks(Ids):
        def __getitem__(self, index: int) -> set:
            return signal.pthread_sigmask(signal.SIG_BLOCK, [])

    def collate(samples: list) -> list:
        return [*samples, signal.pthread_sigmask(signal.SIG_BLOCK, [])]

    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        loader = PyDataloader(Masks(8), 2, num_workers=num_workers, items_in_parallel=items_in_parallel,
                              collate_fn=collate)
        masks = sum(loader, [])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert masks == [before | {signal.SIGUSR2}] * 12


@pytest.mark.parametrize(("num_workers", "items_in_parallel"), [(2, 1), (2, 3), (0, 3)])
def test_parked_workers_leave_signals_to_others(num_workers, items_in_parallel):
    """A worker has signals blocked while it is parked, before and after its work, and not while it works."""
    asked = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGCHLD, signal.SIGUSR1]
    wanted = sum(1 << number - 1 for number in asked)
    before = worker_threads()
    dataset = GatedDataset(4, closed={0})
    loader = PyDataloader(dataset, 2, num_workers=num_workers, items_in_parallel=items_in_parallel)
    batches = iter(loader)
    if num_workers == 0:
        consumer = threading.Thread(target=next, args=(batches,))
        consumer.start()
    dataset.wait_until_started({0})
    num_threads = max(num_workers, 1) * items_in_parallel
    assert eventually(lambda: len(worker_threads() - before) == num_threads)
    workers = [int(name.split()[0]) for name in worker_threads() - before]
    # A worker that is new lets signals in for a moment before it parks.
    assert eventually(lambda: sorted(blocked_signals(worker) & wanted for worker in workers)
                      == [0] + [wanted] * (num_threads - 1))
    dataset.open()
    if num_workers == 0:
        consumer.join()
    list(batches)
    assert eventually(lambda: all(blocked_signals(worker) & wanted == wanted for worker in workers))


def test_python_fork_warning_is_all_that_is_said(run_script):
    """From 3.12 on Python warns of a fork with threads, once there are workers and not before; else nothing is said."""
    source = """
        import os, sys, warnings
        from dataloader_rs import PyDataloader
        from toy_datasets import Ids
        loader = PyDataloader(Ids(8), 2, num_workers=2)
        for used in range(2):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                child = os.fork()
                if child == 0:
                    os._exit(0)
                os.waitpid(child, 0)
                print(len(said))
            list(loader)
        """
    expected = ["0", "1" if sys.version_info >= (3, 12) else "0"]
    assert run_script(source).stdout.splitlines() == expected
