"""Worker threads as user code sees them, loaders used from many threads, and loaders inside loaders."""

from __future__ import annotations

import contextvars
import decimal
import gc
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import FREE_THREADED, eventually, run_threaded, worker_threads
from toy_datasets import PATIENCE, Calls, CountingDataset, GatedDataset, Ids

from dataloader_rs import PyDataloader

np = pytest.importorskip("numpy")

SIZES = [(0, 1), (0, 3), (1, 1), (4, 1), (4, 3)]
every_size = pytest.mark.parametrize(("num_workers", "items_in_parallel"), SIZES)
with_threads = pytest.mark.parametrize(("num_workers", "items_in_parallel"), SIZES[1:])


def load(dataset, batch_size: int, num_workers: int, items_in_parallel: int, **arguments) -> PyDataloader:
    return PyDataloader(dataset, batch_size, num_workers=num_workers, items_in_parallel=items_in_parallel, **arguments)


def num_threads(num_workers: int, items_in_parallel: int) -> int:
    return max(num_workers, 1) * items_in_parallel


# ---- the threads themselves ----


def test_slowest_item_of_a_batch_holds_no_other_thread_up():
    """One batch at a time, four items at once: with one item to wait for, the other threads begin the next batch."""
    dataset = GatedDataset(12, closed=[3])
    batches = iter(load(dataset, 4, 1, 4))
    dataset.wait_until_started(range(8))
    dataset.open()
    assert sum(batches, []) == list(range(12))


def test_batches_are_collated_side_by_side_within_the_window():
    """With one worker, too, where several items are fetched at once; never more than may be ready or in progress."""
    lock = threading.Lock()
    running = most = 0

    def collate(samples: list) -> list:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.005)
        with lock:
            running -= 1
        return samples

    loader = PyDataloader(Ids(400), 4, num_workers=1, items_in_parallel=8, prefetch_depth=2, collate_fn=collate)
    assert sum(loader, []) == list(range(400))
    assert 1 < most <= 3


@with_threads
def test_workers_carry_their_name(num_workers, items_in_parallel):
    """``threading`` and the system both know a worker by a name that starts with dlrs-."""

    def names(index: int) -> tuple[str, str]:
        return threading.current_thread().name, Path("/proc/thread-self/comm").read_text().strip()

    found = set(sum(load(Calls(64, names), 4, num_workers, items_in_parallel), []))
    assert all(name.startswith("dlrs-") and name.startswith(comm) for name, comm in found), found
    assert len({name for name, _ in found}) <= num_threads(num_workers, items_in_parallel)


@with_threads
def test_threads_are_made_at_the_first_epoch_and_reused(num_workers, items_in_parallel):
    """num_workers * items_in_parallel threads, none before the first iter(), the same ones for every epoch."""
    before = worker_threads()
    loader = load(Ids(64), 4, num_workers, items_in_parallel)
    len(loader), repr(loader)
    assert worker_threads() == before
    batches = iter(loader)
    assert eventually(lambda: len(worker_threads() - before) == num_threads(num_workers, items_in_parallel))
    made = worker_threads() - before
    list(batches)
    for _ in range(20):
        list(loader)
        next(iter(loader))
    assert worker_threads() - before == made


def test_no_threads_without_workers():
    """With 0 workers and single items everything happens on the calling thread."""
    before = worker_threads()
    loader = load(Calls(8, lambda index: threading.get_ident()), 2, 0, 1,
                  collate_fn=lambda samples: [*samples, threading.get_ident()])
    assert set(sum(loader, [])) == {threading.get_ident()}
    assert worker_threads() == before


@every_size
def test_user_code_runs_where_it_is_promised(num_workers, items_in_parallel):
    """With workers, items and collate_fn are the workers'; with none, collate_fn is the caller's."""
    me = threading.get_ident()
    loader = load(Calls(24, lambda index: threading.get_ident()), 4, num_workers, items_in_parallel,
                  collate_fn=lambda samples: (set(samples), threading.get_ident()))
    for items, collate in loader:
        assert (me in items) == (num_workers == 0 and items_in_parallel == 1)
        assert (collate == me) == (num_workers == 0)


@with_threads
def test_thread_local_values_last_over_epochs(num_workers, items_in_parallel):
    """What a worker keeps in a threading.local is there for every later item and epoch."""
    local = threading.local()

    def count(index: int) -> int:
        local.count = getattr(local, "count", 0) + 1
        return local.count

    loader = load(Calls(60, count), 4, num_workers, items_in_parallel)
    counts = [count for _ in range(5) for batch in loader for count in batch]
    # Each thread counted 1, 2, 3, ... : as many threads reached n + 1 as reached n, or fewer.
    assert counts.count(1) <= num_threads(num_workers, items_in_parallel)
    reached = [counts.count(n) for n in range(1, max(counts) + 1)]
    assert reached == sorted(reached, reverse=True) and len(counts) == 300


RECURSION = """
    import sys
    from dataloader_rs import PyDataloader, PyDataset

    def descend(depth):
        # Through C, so that every level costs stack of the thread.
        return depth and sorted([depth], key=lambda value: descend(value - 1))[0]

    class Deep(PyDataset):
        def __len__(self):
            return 4
        def __getitem__(self, index):
            return descend(LEVELS)

    LEVELS = 1000  # some 5 kB of stack each: too many for 2 MiB, not for 8 MiB
    sys.setrecursionlimit(100_000)
    assert descend(LEVELS) == LEVELS
    for num_workers, items_in_parallel in [(0, 1), (1, 1), (2, 1), (0, 3)]:
        loader = PyDataloader(Deep(), 2, num_workers=num_workers, items_in_parallel=items_in_parallel)
        assert list(loader) == [[LEVELS] * 2] * 2
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc")
@pytest.mark.slow
def test_stack_size_of_the_program_holds_for_all_its_threads(run_script):
    """What the program asked for before is what workers of all loaders get, and threads of its own afterwards."""
    run_script("""
        import ctypes, threading
        from dataloader_rs import PyDataloader
        from toy_datasets import Ids

        glibc = ctypes.CDLL(None)
        glibc.pthread_self.restype = ctypes.c_void_p
        glibc.pthread_getattr_np.argtypes = [ctypes.c_void_p, ctypes.c_char_p]

        def stack_size():
            attributes, size = ctypes.create_string_buffer(64), ctypes.c_size_t()
            assert glibc.pthread_getattr_np(glibc.pthread_self(), attributes) == 0
            assert glibc.pthread_attr_getstacksize(attributes, ctypes.byref(size)) == 0
            glibc.pthread_attr_destroy(attributes)
            return size.value >> 20

        class StackSizes(Ids):
            def __getitem__(self, index):
                return stack_size()

        def sizes_of_workers():
            return sum(PyDataloader(StackSizes(4), num_workers=2), [])

        assert sizes_of_workers() == [8] * 4
        threading.stack_size(32 << 20)
        assert sizes_of_workers() == sizes_of_workers() == [32] * 4
        mine = []
        thread = threading.Thread(target=lambda: mine.append(stack_size()))
        thread.start()
        thread.join()
        assert mine == [32]
        assert threading.stack_size(1 << 20) == 32 << 20
        assert min(sizes_of_workers()) >= 8  # glibc may use one again that is larger
        """)


@pytest.mark.skipif(sys.version_info[:2] == (3, 12), reason="it counts calls through C, and allows too few")
def test_recursion_is_as_deep_as_on_the_main_thread(run_script):
    """A depth of C calls that the main thread bears works on a worker: its stack is as large."""
    run_script(RECURSION)


@with_threads
def test_trace_and_profile_functions_are_installed(num_workers, items_in_parallel):
    """Workers start with the functions of threading.settrace and threading.setprofile, as Python's threads do."""
    traced: set = set()
    profiled: set = set()

    def trace(frame, event, argument):
        traced.add((frame.f_code.co_name, threading.get_ident()))

    def profile(frame, event, argument):
        profiled.add((frame.f_code.co_name, threading.get_ident()))

    def traced_item(index: int) -> int:
        return threading.get_ident()

    before = threading.gettrace(), threading.getprofile()
    threading.settrace(trace)
    threading.setprofile(profile)
    try:
        workers = set(sum(load(Calls(32, traced_item), 4, num_workers, items_in_parallel), []))
    finally:
        threading.settrace(before[0])
        threading.setprofile(before[1])
    assert {("traced_item", worker) for worker in workers} <= traced
    assert {("traced_item", worker) for worker in workers} <= profiled


@with_threads
def test_trace_and_profile_functions_are_left_alone_where_there_are_none(num_workers, items_in_parallel, monkeypatch):
    """To set one, to None also, stops every thread of a free-threaded interpreter, once for each worker that ends."""
    calls: list[object] = []
    monkeypatch.setattr(sys, "setprofile", calls.append)
    if sys.gettrace() is None:  # a coverage run traces
        monkeypatch.setattr(sys, "settrace", calls.append)
    list(load(Ids(20), 4, num_workers, items_in_parallel))
    gc.collect()
    assert eventually(lambda: not worker_threads())
    assert calls == []


@with_threads
def test_threading_forgets_workers_that_ended(num_workers, items_in_parallel):
    """No entry of a dead worker stays in ``threading`` (Python does not see to that before 3.13)."""

    def entries() -> list[str]:
        return [thread.name for thread in list(threading._active.values()) if thread.name.startswith("dlrs-")]

    assert eventually(lambda: not entries())
    for _ in range(3):
        list(load(Ids(20), 4, num_workers, items_in_parallel))
    gc.collect()
    assert eventually(lambda: not entries()), entries()


# ---- contexts ----

variable: contextvars.ContextVar = contextvars.ContextVar("variable", default="default")


@every_size
def test_items_run_in_a_copy_of_the_context_of_iter(num_workers, items_in_parallel):
    """Items and collate_fn see the context that was current at iter(), whatever the consumer changes later."""
    loader = load(Calls(16, lambda index: variable.get()), 2, num_workers, items_in_parallel,
                  collate_fn=lambda samples: [*samples, variable.get()])
    token = variable.set("at iter")
    try:
        batches = iter(loader)
        variable.set("later")
        assert sum(batches, []) == ["at iter"] * 24
        assert sum(loader, []) == ["later"] * 24
    finally:
        variable.reset(token)
    assert sum(loader, []) == ["default"] * 24


@pytest.mark.parametrize(("num_workers", "items_in_parallel"), [(0, 1), (1, 1)])
def test_context_change_lasts_for_the_epoch_and_does_not_leak(num_workers, items_in_parallel):
    """What an item sets in its context the same worker sees until the epoch ends, and nobody else does."""

    def swap(index: int):
        old = variable.get()
        variable.set(index)
        return old

    loader = load(Calls(6, swap), 2, num_workers, items_in_parallel)
    for _ in range(2):
        first, second = iter(loader), iter(loader)  # epochs at the same time do not see each other either
        found = [(next(first), next(second), variable.get()) for _ in range(3)]
        assert found == [(pair, pair, "default") for pair in (["default", 0], [1, 2], [3, 4])]


def test_each_worker_has_a_context_of_its_own():
    """Two workers that set a variable at the same time do not see each other's value."""
    barrier = threading.Barrier(2)

    def set_and_get(index: int) -> bool:
        variable.set(threading.get_ident())
        barrier.wait(PATIENCE)
        return variable.get() == threading.get_ident()

    assert list(load(Calls(8, set_and_get), 1, 2, 1)) == [[True]] * 8
    assert list(load(Calls(8, set_and_get), 2, 0, 2)) == [[True, True]] * 4


@every_size
def test_error_state_of_numpy_and_decimal_context_hold(num_workers, items_in_parallel):
    """np.errstate and a decimal context around iter() rule on the workers."""

    def divide(index: int):
        try:
            np.float64(1) / np.float64(0)
        except FloatingPointError:
            return decimal.Decimal(1) / 3
        return None

    with np.errstate(divide="raise"), decimal.localcontext() as context:
        context.prec = 5
        batches = iter(load(Calls(8, divide), 2, num_workers, items_in_parallel))
    assert sum(batches, []) == [decimal.Decimal("0.33333")] * 8


# ---- many threads, one loader ----


@every_size
def test_next_on_two_threads_at_once_raises(num_workers, items_in_parallel):
    """While one thread is inside next(), another gets RuntimeError at once, and the first is not disturbed."""
    dataset = GatedDataset(4, closed={0})
    batches = iter(load(dataset, 2, num_workers, items_in_parallel))
    outcomes: list = []

    def consume(number: int) -> None:
        try:
            outcomes.append(next(batches))
        except RuntimeError as error:
            outcomes.append(str(error))
            dataset.open()  # for the other, which waits

    run_threaded(consume, 2)
    assert "under way" in outcomes[0] and outcomes[1] == [0, 1]
    assert len(batches) == 1 and list(batches) == [[2, 3]]


@every_size
def test_create_iterate_and_drop_on_different_threads(num_workers, items_in_parallel):
    """A loader may be made on one thread, its epoch started on another, read on a third and dropped on a fourth."""
    before = worker_threads()
    held: dict = {}
    for step in (
        lambda: held.update(loader=load(Ids(20), 3, num_workers, items_in_parallel)),
        lambda: held.update(batches=iter(held["loader"])),
        lambda: held.update(found=next(held["batches"])),
        lambda: held.update(rest=list(held["batches"])),
        lambda: (held.pop("loader"), held.pop("batches")),
    ):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join(PATIENCE)
    assert held["found"] + sum(held["rest"], []) == list(range(20))
    assert eventually(lambda: worker_threads() <= before)


@every_size
def test_many_threads_share_one_loader(num_workers, items_in_parallel):
    """Threads that start, read and drop epochs of one loader all at once each get their own, complete."""
    loader = load(Ids(40), 3, num_workers, items_in_parallel)

    def hammer(number: int) -> None:
        for _ in range(10):
            batches = iter(loader)
            assert next(batches) == [0, 1, 2]
            if number % 2:
                assert sum(batches, []) == list(range(3, 40))

    run_threaded(hammer, 6)
    assert sum(loader, []) == list(range(40))


@with_threads
def test_many_threads_start_one_pool(num_workers, items_in_parallel):
    """Of threads that meet at the first iter() of a loader, and at the first after close(), one starts the workers."""
    before = worker_threads()
    loader = load(Ids(8), 2, num_workers, items_in_parallel)
    for _ in range(10):
        run_threaded(lambda number: list(loader), 4)
        assert eventually(lambda: len(worker_threads() - before) == num_threads(num_workers, items_in_parallel))
        loader.close()
        assert eventually(lambda: worker_threads() <= before)


@with_threads
def test_many_threads_make_and_drop_loaders(num_workers, items_in_parallel):
    """Pools that come and go on many threads at once disturb nobody and leave no thread."""
    before = worker_threads()

    def hammer(number: int) -> None:
        for _ in range(5):
            batches = iter(load(Ids(12), 2, num_workers, items_in_parallel))
            assert next(batches) == [0, 1]
            if number % 2:
                assert len(list(batches)) == 5

    run_threaded(hammer, 4)
    assert eventually(lambda: worker_threads() <= before)


def test_iterators_share_the_workers_fairly():
    """Two epochs of one loader take turns: the one that started first does not get all the work done first."""

    class Thousands:
        """Epoch number n asks for items 1000 * n, 1000 * n + 1, ..."""

        number = 0

        def __len__(self) -> int:
            return 40

        def __iter__(self):
            self.number += 1
            return iter(range(1000 * self.number, 1000 * self.number + 40))

    dataset = GatedDataset(10_000, closed={1000})
    loader = PyDataloader(dataset, 1, prefetch_depth=100, num_workers=1, sampler=Thousands())
    first = iter(loader)
    dataset.wait_until_started({1000})
    second, third = iter(loader), iter(loader)
    dataset.open()
    assert len(list(first)) == len(list(second)) == len(list(third)) == 40
    order = [index // 1000 for index in dataset.started]
    for end in range(2, 112):
        counts = [order[1:end].count(number) for number in (1, 2, 3)]
        assert max(counts) - min(counts) <= 1, order


# ---- loaders inside loaders ----


class IteratesOwnLoader(Ids):
    """Iterates its own loader in ``__getitem__``; a sample is the error that came of it, or the batches."""

    loader: PyDataloader

    def __getitem__(self, index: int):
        if index >= 2:
            return index
        try:
            return list(self.loader)
        except RuntimeError as error:
            return str(error)


@with_threads
def test_iterating_the_own_loader_on_a_worker_raises(num_workers, items_in_parallel):
    """A worker that would wait for an epoch of its own pool gets RuntimeError instead of a hang."""
    dataset = IteratesOwnLoader(4)
    dataset.loader = load(dataset, 2, num_workers, items_in_parallel)
    (first, second), rest = dataset.loader
    assert "own worker" in first and "own worker" in second and rest == [2, 3]


def test_iterating_the_own_loader_without_workers_recurses():
    """Without workers an epoch inside an epoch is an ordinary recursion."""

    class Nested(Ids):
        depth = 0
        loader: PyDataloader

        def __getitem__(self, index: int):
            self.depth += 1
            try:
                return list(self.loader) if self.depth == 1 else index
            finally:
                self.depth -= 1

    dataset = Nested(2)
    dataset.loader = load(dataset, 2, 0, 1)
    assert list(dataset.loader) == [[[[0, 1]]] * 2]


class AsksItsIterator(Ids):
    """Calls ``next()`` on the iterator it is loaded by."""

    batches = None

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.ready = threading.Event()

    def __getitem__(self, index: int):
        self.ready.wait(PATIENCE)
        if index > 0:
            return index
        try:
            return next(self.batches)
        except RuntimeError as error:
            return str(error)


@every_size
def test_next_inside_the_own_item_raises(num_workers, items_in_parallel):
    """next(it) from inside an item of `it` is a RuntimeError, also when the consumer is not inside next()."""
    dataset = AsksItsIterator(4)
    batches = dataset.batches = iter(load(dataset, 2, num_workers, items_in_parallel))
    dataset.ready.set()
    (error, one), rest = batches
    assert "next() is under way" in error or "its own loader" in error
    assert (one, rest) == (1, [2, 3])
    dataset.batches = None


class Loads(Ids):
    """Each item is an epoch of another loader, or the error it raised."""

    other: PyDataloader

    def __getitem__(self, index: int):
        try:
            return list(self.other)
        except RuntimeError as error:
            return str(error)


@pytest.mark.parametrize("inner", SIZES, ids=str)
@every_size
def test_nested_loaders_work(num_workers, items_in_parallel, inner):
    """A dataset that iterates another loader gets its epochs, whoever has workers."""
    dataset = Loads(6)
    dataset.other = load(Ids(4), 2, *inner)
    assert sum(load(dataset, 2, num_workers, items_in_parallel), []) == [[[0, 1], [2, 3]]] * 6


@pytest.mark.parametrize("sizes", [((1, 1), (1, 1)), ((2, 3), (2, 3)), ((1, 1), (0, 3)), ((0, 3), (1, 1))], ids=str)
def test_loaders_that_nest_each_other_raise(sizes):
    """A loads B, which loads A: a RuntimeError at the point where it would wait for itself, never a hang."""
    first, second = Loads(2), Loads(2)
    first.other = load(second, 1, *sizes[1])
    second.other = loader = load(first, 1, *sizes[0])
    for batch in loader:
        for inner in batch[0]:
            assert "own worker" in inner[0]


def test_loaders_without_workers_pass_the_way_back_on():
    """A with workers loads B without, which loads A: the same, although B has no threads to tell it by."""
    first, second = Loads(2), Loads(2)
    first.other = load(second, 1, 0, 1)
    second.other = loader = load(first, 1, 2, 1)
    for batch in loader:
        for inner in batch[0]:
            assert "own worker" in inner[0]


# ---- free-threaded builds ----

GIL_STAYS_OFF = """
    import sys
    import dataloader_rs
    assert not sys._is_gil_enabled()
    import importlib, pathlib
    from toy_datasets import Ids
    names = {path.name.split(".")[0] for path in pathlib.Path(dataloader_rs.__file__).parent.glob("*.so")}
    assert "_core" in names
    for name in names:
        importlib.import_module(f"dataloader_rs.{name}")
    assert sum(dataloader_rs.PyDataloader(Ids(100), 4, num_workers=4), []) == list(range(100))
    assert not sys._is_gil_enabled()
"""


@pytest.mark.skipif(not FREE_THREADED, reason="needs a free-threaded build")
def test_import_leaves_the_gil_off(run_script):
    """B39: importing the package and its extensions, and an epoch with workers, never switch the GIL on."""
    run_script(GIL_STAYS_OFF)


@pytest.mark.skipif(not FREE_THREADED, reason="needs a free-threaded build")
def test_workers_run_python_at_the_same_time():
    """Two items meet inside pure Python, without ever giving up the interpreter."""
    arrived = [0, 0]

    def meet(index: int) -> bool:
        arrived[index] = 1
        end = time.monotonic() + PATIENCE
        while sum(arrived) < 2 and time.monotonic() < end:
            pass
        return sum(arrived) == 2

    assert list(load(Calls(2, meet), 1, 2, 1)) == [[True], [True]]


def test_many_counters_agree():
    """Nothing is asked for twice or left out when many threads read epochs at once."""
    dataset = CountingDataset(100)
    loader = load(dataset, 3, 4, 3)
    run_threaded(lambda number: list(loader), 4)
    assert sorted(dataset.started) == sorted([*range(100)] * 4)
    assert sys.getrefcount(dataset) < 1000


@with_threads
def test_length_may_be_read_while_another_thread_takes_batches(num_workers, items_in_parallel):
    """Whoever looks sees it go down, never up, to 0; under ThreadSanitizer (`make tsan`) also without a race."""
    batches = iter(load(Ids(60), 1, num_workers, items_in_parallel))
    barrier = threading.Barrier(2)

    def use(number: int) -> list:
        barrier.wait(PATIENCE)
        if number == 0:
            return list(batches)
        seen = [len(batches)]
        while seen[-1]:
            seen.append(len(batches))
        return seen

    taken, seen = run_threaded(use, 2)
    assert taken == [[index] for index in range(60)]
    assert seen == sorted(seen, reverse=True) and seen[0] <= 60
