"""Memory of stacked batches is used again, never while somebody can reach it; and what is kept is bounded."""

from __future__ import annotations

import copy
import collections
import gc
import os
import pickle
import threading
import types
import weakref

import pytest
from conftest import eventually, run_threaded
from toy_datasets import Ids

from dataloader_rs import PyDataloader, _buffers, collate, default_collate

np = pytest.importorskip("numpy")

KB = 1 << 10
MB = 1 << 20
# Longer than anything free is kept.
LONG = 25.0


@pytest.fixture(autouse=True)
def empty_store():
    """Each test begins with nothing kept, and long after the last one."""
    gc.collect()
    _buffers.skip_time(10 * LONG)
    collate.release_buffers()
    yield
    collate.release_buffers()


def in_use() -> int:
    return collate.buffer_usage()["in_use"]


def kept() -> int:
    return collate.buffer_usage()["kept"]


def stacked(value: int, size: int = MB):
    """A batch of 4 arrays, `size` bytes in all."""
    return default_collate([np.full(size // 4, value, "u1")] * 4)


def address(array) -> int:
    return array.__array_interface__["data"][0]


# ---- used again, and when ----


@pytest.mark.parametrize("size", [4 * KB, 20 * KB, 127 * KB, 128 * KB, MB, 5 * MB])
def test_dead_batch_leaves_its_memory_to_the_next(size):
    """In a loop that drops each batch, all batches lie in one place, which is aligned."""
    addresses = set()
    for value in range(10):
        batch = stacked(value, size)
        assert batch.nbytes == size and (batch == value).all()
        addresses.add(address(batch))
        del batch
    assert len(addresses) == 1
    assert addresses.pop() % _buffers.ALIGNMENT == 0


@pytest.mark.parametrize("row_size", [4095, 4096, 4097, 5000, 70_001, MB + 13])
def test_large_batches_are_copied_to_the_last_byte(row_size):
    """Rows that begin and end anywhere, in a batch that is written past the caches, beside rows with strides."""
    rng = np.random.default_rng(row_size)
    rows = [rng.integers(0, 256, row_size + 1, "u1")[1:] for _ in range(5 * MB // (2 * row_size) + 2)]
    rows[1] = np.repeat(rows[1], 2)[::2]
    batch = default_collate(rows)
    assert batch.nbytes > 2 * MB
    assert batch.tobytes() == b"".join(row.tobytes() for row in rows)


VIEWS = {
    "slice": lambda batch: batch[1:, ::2],
    "one row": lambda batch: batch[0],
    "other dtype": lambda batch: batch.view("u4"),
    "transposed": lambda batch: batch.T[5:].T,
    "memoryview": memoryview,
    "view of a view": lambda batch: batch[1:][1:][:, 3:],
    "subclass": lambda batch: batch.view(np.recarray),
    "frombuffer": lambda batch: np.frombuffer(batch, "u1"),
    "from the interface": lambda batch: np.asarray(types.SimpleNamespace(
        __array_interface__=batch.__array_interface__, owner=batch)),
    "dlpack": lambda batch: np.from_dlpack(batch),
    "base": lambda batch: batch.base,
    "memoryview of the base": lambda batch: memoryview(batch.base),
    "iterator": lambda batch: batch.flat,
    "chunks": lambda batch: np.array_split(batch, 3),
}


@pytest.mark.parametrize("view_of", VIEWS.values(), ids=VIEWS)
def test_memory_is_not_used_again_while_a_view_lives(view_of):
    """B59: whatever still reaches the memory keeps it; only after the last view it is given away."""
    batch = stacked(7)
    where = address(batch)
    view = view_of(batch)
    del batch
    others = [stacked(8) for _ in range(3)]
    assert where not in map(address, others)
    content = view if not isinstance(view, list) else view[0]
    assert (np.asarray(content) == (0x07070707 if getattr(content, "itemsize", 1) == 4 else 7)).all()
    del view, content
    assert address(stacked(9)) == where


class Constant(Ids):
    def __getitem__(self, index: int):
        return np.full(1024, index, "f8")


def test_delivered_batches_are_never_overwritten(num_workers):
    """B59: the first 10 batches are what they were at delivery, after 100 more."""
    loader = PyDataloader(Constant(8 * 110), batch_size=8, num_workers=num_workers, prefetch_depth=3,
                          collate_fn=default_collate)
    first, copies = [], []
    for number, batch in enumerate(loader):
        if number < 10:
            first.append(batch)
            copies.append(batch.copy())
    assert len(first) == 10
    for batch, at_delivery in zip(first, copies, strict=True):
        assert (batch == at_delivery).all()


def test_epoch_that_is_held_whole_takes_more_memory():
    """B59: nothing waits for a buffer; holding all batches works."""
    loader = PyDataloader(Constant(8 * 200), batch_size=8, num_workers=2, collate_fn=default_collate)
    batches = list(loader)
    assert len(set(map(address, batches))) == 200
    for number, batch in enumerate(batches):
        assert (batch == np.arange(number * 8, number * 8 + 8)[:, None]).all()


def test_failed_stacking_gives_its_memory_back():
    """An error in the middle of a batch leaks nothing."""
    before = in_use()
    with pytest.raises(ValueError, match="target must have"):
        _buffers.copy_rows(_buffers.empty_array(np.ndarray, (2, MB), np.dtype("u1"), 2 * MB), [np.zeros(3)], 24)
    with pytest.raises(TypeError):
        _buffers.empty_array(np.ndarray, (2, MB), np.dtype("f8"), 2 * MB)
    assert in_use() == before


def test_copies_and_pickles_have_memory_of_their_own():
    """What leaves the process, or is copied, is an ordinary array."""
    batch = stacked(3)
    for other in (copy.copy(batch), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch)), batch + 0):
        assert not isinstance(other.base, _buffers.Buffer) and not np.shares_memory(other, batch)
        assert (other == batch).all()
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(batch.base)


def test_batch_may_be_written_to_and_reshaped():
    """It is an array like any other."""
    batch = stacked(1)
    batch += 1
    assert batch.reshape(2, -1).sum() == 2 * MB
    np.add(batch, 1, out=batch)
    assert (batch == 3).all()


def test_batch_that_dies_in_a_cycle_gives_its_memory_back():
    """The garbage collector counts as the last reference, too."""
    before = in_use()
    cycle: list = [stacked(1)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert in_use() == before


# ---- what is kept ----


def test_sizes_that_take_turns_use_their_memory_again():
    """One batch at a time, of three sizes in turn: within twice the largest, all three are kept."""
    before = collate.buffer_usage()
    for value in range(30):
        stacked(value, (1 + value % 3) * MB)
        assert kept() <= 6 * MB
    after = collate.buffer_usage()
    assert after["taken"] - before["taken"] == 30 and after["reused"] - before["reused"] == 27
    assert in_use() == 0


def test_never_more_is_kept_than_twice_what_was_in_use_at_once():
    """One batch at a time, of many sizes: the longest unused goes."""
    for step in range(40):
        stacked(1, (4 + step % 8) * MB)
        assert kept() <= 2 * 14 * MB
    assert kept() > 14 * MB


def test_most_in_use_is_forgotten_after_a_while():
    """An epoch that was held whole is kept for the next, not for a loop that drops its batches."""
    stacked(1)
    _buffers.skip_time(9)
    held = [stacked(1) for _ in range(20)]
    del held
    assert kept() == 20 * MB
    _buffers.skip_time(3)
    stacked(1)
    assert kept() == 20 * MB
    _buffers.skip_time(10)
    stacked(1)
    assert kept() == 2 * MB


def test_buffer_that_nobody_wants_goes_after_a_while():
    """After a change of sizes the old ones do not stay, while those in use do."""
    stacked(1, MB)
    for _ in range(3):
        stacked(1, 2 * MB)
        assert kept() == 3 * MB
        _buffers.skip_time(6)
    _buffers.skip_time(6)
    before = collate.buffer_usage()["reused"]
    stacked(1, 2 * MB)
    assert kept() == 2 * MB
    assert collate.buffer_usage()["reused"] == before + 1


def test_slow_loop_still_uses_its_memory_again():
    """A batch every hour lies where the last one did."""
    first = address(stacked(1))
    _buffers.skip_time(3600)
    before = collate.buffer_usage()["reused"]
    assert address(stacked(2)) == first
    assert collate.buffer_usage()["reused"] == before + 1


def test_limit_bounds_what_is_kept():
    """With 0 nothing is; a new limit counts at once, and wrong ones are named."""
    limit = collate.buffer_usage()["limit"]
    assert MB < limit < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 7
    try:
        held = [stacked(1) for _ in range(5)]
        del held
        collate.limit_buffers(2 * MB)
        assert kept() == 2 * MB
        collate.limit_buffers(0)
        assert kept() == 0
        stacked(1)
        assert kept() == 0
        with pytest.raises(ValueError, match="num_bytes must be >= 0, got -1"):
            collate.limit_buffers(-1)
        for wrong in (1.5, True, "1"):
            with pytest.raises(TypeError, match="num_bytes must be an integer, got"):
                collate.limit_buffers(wrong)
        collate.limit_buffers(10**30)
    finally:
        collate.limit_buffers(limit)


def test_released_memory_is_back_with_the_system(run_script):
    """release_buffers says how much it gives back, and the process is smaller by that; living arrays stay."""
    run_script("""
        import os
        import numpy as np
        from dataloader_rs import collate, default_collate

        def resident():
            with open("/proc/self/statm") as statm:
                return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        MB = 1 << 20
        row = np.ones(MB, "u1")
        held = [default_collate([row] * 8) for _ in range(8)]
        full = resident()
        kept = held.pop()
        held.clear()
        assert resident() > full - MB
        assert collate.buffer_usage()["kept"] == 56 * MB
        assert collate.release_buffers() == 56 * MB
        assert resident() < full - 50 * MB, (resident(), full)
        assert collate.buffer_usage()["kept"] == 0 and collate.release_buffers() == 0
        assert (kept == 1).all()
        """)


def test_too_large_a_batch_is_a_memory_error():
    """And leaves no trace in the counts."""
    before = collate.buffer_usage()
    with pytest.raises(MemoryError, match="no memory for an array of"):
        _buffers.Buffer(1 << 50)
    with pytest.raises(MemoryError):
        _buffers.Buffer((1 << 46) + 1)
    assert collate.buffer_usage() == before


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 5119, 5120, 5121, 130_000, 131_073, MB - 1, MB + 1, 7 * MB + 5])
def test_buffer_is_as_large_as_asked_and_little_larger(size):
    """A quarter more at most, or a page."""
    before = in_use()
    buffer = _buffers.Buffer(size)
    view = memoryview(buffer)
    assert view.nbytes == size and not view.readonly and view.format == "B" and view.shape == (size,)
    view[-1] = 1
    assert size <= in_use() - before <= max(4096, size * 1.25 + 1)


# ---- threads and processes ----


def test_threads_share_the_store():
    """Batches that are made, checked and dropped on several threads are never mixed up, and none is lost."""
    before = in_use()

    def work(number: int) -> None:
        held = []
        for round_number in range(60):
            value = (number * 60 + round_number) % 251
            held.append((value, stacked(value, (1 + round_number % 4) * 64 * KB)))
            if len(held) > 3:
                value, batch = held.pop(round_number % 3)
                assert (batch == value).all()
        for value, batch in held:
            assert (batch == value).all()

    run_threaded(work, 4)
    gc.collect()
    assert in_use() == before


def test_batch_that_dies_on_another_thread_gives_its_memory_back_at_once():
    """Also on free-threaded builds, where the thread that made it sleeps, and however deep it lies in a batch."""
    before = in_use()
    box: list = []
    made, stop = threading.Event(), threading.Event()

    def make() -> None:
        box.append({"deep": [{"er": ({"est": stacked(1)},)}]})
        made.set()
        stop.wait(20)

    thread = threading.Thread(target=make)
    thread.start()
    try:
        assert made.wait(20)
        assert in_use() > before
        # The containers are the other thread's own, and may die late.
        array = box[0]["deep"][0]["er"][0].pop("est")
        alive = weakref.ref(array)
        del array
        assert alive() is None
        assert in_use() == before
    finally:
        stop.set()
        thread.join()


def test_loader_allocates_nothing_in_the_steady_state(num_workers):
    """Point 9: after a first epoch, batches find memory of earlier ones; only the ends of epochs may need some more."""
    loader = PyDataloader(Constant(16 * 100), batch_size=16, num_workers=num_workers, collate_fn=default_collate)
    collections.deque(loader, maxlen=0)
    before = collate.buffer_usage()
    for batch in loader:
        assert batch.base is not None
    after = collate.buffer_usage()
    fresh = after["taken"] - before["taken"] - (after["reused"] - before["reused"])
    assert after["taken"] - before["taken"] == 100
    assert fresh <= num_workers + 4, fresh
    del batch
    loader.close()
    assert eventually(lambda: gc.collect() >= 0 and in_use() == 0)


def test_page_faults_stay_away(run_script):
    """Point 9: 32 arrays of 150 KB a batch; np.stack pays a thousand page faults for it, default_collate none."""
    run_script("""
        import resource
        import numpy as np
        from dataloader_rs import default_collate

        samples = [np.ones(150_000, "u1") for _ in range(32)]

        def faults(collate):
            collate(samples)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(50):
                collate(samples)
            return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 50

        assert faults(default_collate) < 5
        """)


def test_forked_child_uses_the_store(run_script):
    """Fork while other threads take and give: the child has its copies of all batches and makes new ones."""
    run_script("""
        import os
        import threading
        import warnings
        import numpy as np
        from dataloader_rs import collate, default_collate

        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
        stop = threading.Event()
        rows = [np.full(40_000, value, "u1") for value in range(4)]

        def churn():
            while not stop.is_set():
                default_collate(rows)

        def release():  # without the GIL, so that forks meet it at work where there is one
            while not stop.is_set():
                collate.release_buffers()

        threads = [threading.Thread(target=target) for target in (churn, release, release)]
        kept = default_collate(rows)
        for thread in threads:
            thread.start()
        for _ in range(100):
            child = os.fork()
            if child == 0:
                batches = [default_collate(rows) for _ in range(20)]
                good = all((batch == kept).all() for batch in batches)
                del batches
                kept[:] = 9
                collate.release_buffers()
                os._exit(0 if good else 1)
            assert os.waitpid(child, 0)[1] == 0
        stop.set()
        for thread in threads:
            thread.join()
        assert (kept == np.arange(4)[:, None]).all()
        """, timeout=60)


def test_batches_alive_at_exit_do_no_harm(run_script):
    """In globals, in cycles, on a daemon thread: the process ends well and prints nothing."""
    run_script("""
        import threading
        import numpy as np
        from dataloader_rs import default_collate

        kept = default_collate([np.zeros(100_000)] * 4)
        cycle = [kept[1:]]
        cycle.append(cycle)
        started = threading.Event()

        def hold():
            local = default_collate([np.zeros(100_000)] * 4)
            started.set()
            threading.Event().wait()

        threading.Thread(target=hold, daemon=True).start()
        started.wait()
        """)
