"""What is alive when: bounded prefetching, nothing kept of a delivered batch, nothing that grows with the data set."""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import pytest
from conftest import FREE_THREADED, eventually, worker_threads
from toy_datasets import CountingDataset, FailingDataset, Ids

from dataloader_rs import PyDataloader

pytestmark = pytest.mark.slow

np = pytest.importorskip("numpy")

MB = 1 << 20

every_size = pytest.mark.parametrize(
    ("num_workers", "items_in_parallel"), [(0, 1), (0, 3), (1, 1), (4, 1), (4, 3)])
with_workers = pytest.mark.parametrize(("num_workers", "items_in_parallel"), [(1, 1), (4, 1), (1, 3), (4, 3)])

# For scripts: resident size of the process in bytes.
RESIDENT = """
    import ctypes, gc, json, os, sys, time
    from dataloader_rs import PyDataloader
    from tasks import num_threads
    from toy_datasets import Ids

    num_workers, items_in_parallel = map(int, sys.argv[1:])

    def resident():
        gc.collect()
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def load(dataset, batch_size, **arguments):
        return PyDataloader(dataset, batch_size, num_workers=num_workers, items_in_parallel=items_in_parallel,
                            **arguments)
"""


@pytest.fixture
def measured(run_script):
    """Run a script after RESIDENT; what it prints, as JSON."""

    def run(source: str, num_workers: int, items_in_parallel: int = 1):
        whole = textwrap.dedent(RESIDENT) + textwrap.dedent(source)
        return json.loads(run_script(whole, str(num_workers), str(items_in_parallel), timeout=50).stdout)

    return run


@pytest.fixture
def no_collection():
    """The garbage collector does not run in this test: what dies, dies by its reference count."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Mark:
    """A leaf whose death can be seen."""


class Holder(Ids):
    """``dataset[i]`` is what ``make(i, mark)`` puts around a new Mark; knows all marks."""

    def __init__(self, length: int, make) -> None:
        super().__init__(length)
        self.make = make
        self.marks: list[weakref.ref] = []

    def __getitem__(self, index: int):
        mark = Mark()
        self.marks.append(weakref.ref(mark))
        return self.make(index, mark)

    def alive(self) -> int:
        return sum(mark() is not None for mark in self.marks)


# ---- nothing that grows with the data set, or with time ----


def test_memory_does_not_grow_with_workers(measured):
    """B17: workers share a list of 2,000,000 strings; two shuffled epochs over it take no memory, and no process."""
    start, first, second, children = measured("""
        class Names(Ids):
            def __init__(self, length):
                super().__init__(length)
                self.names = [f"{number:08}.jpg" for number in range(length)]
            def __getitem__(self, index):
                return len(self.names[index])

        # Free-threaded workers wait for each other at the one list, which here only takes time.
        length = 2_000_000 if getattr(sys, "_is_gil_enabled", lambda: True)() else 500_000
        loader = load(Names(length), 256, shuffle=True, prefetch_depth=2)
        sizes = [resident()]
        for _ in range(2):
            assert sum(map(sum, loader)) == 12 * length
            sizes.append(resident())
        try:
            os.waitpid(-1, os.WNOHANG)
            children = True
        except ChildProcessError:
            children = False
        print(json.dumps([*sizes, children]))
        """, 8)
    assert not children
    assert first - start < 40 * MB and second - start < 40 * MB, (start, first, second)
    assert second - first < 5 * MB, (start, first, second)


@every_size
def test_huge_length_costs_nothing(num_workers, items_in_parallel):
    """B19: a length of 1 << 40 without shuffling: no time, no memory; 1 << 63 is Python's OverflowError."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    loader = PyDataloader(Ids(1 << 40), 3, num_workers=num_workers, items_in_parallel=items_in_parallel)
    assert len(loader) == 366503875926
    next(iter(loader))  # the threads are made here
    before = resident()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        batches = iter(loader)
        assert next(batches) == [0, 1, 2]
        middle = time.perf_counter()
        assert len(batches) == 366503875925
        del batches
        times.append((middle - start, time.perf_counter() - middle))
    assert min(first for first, _ in times) < 0.05, times
    assert min(dropping for _, dropping in times) < 0.5, times
    assert resident() - before < 5 * MB
    too_long = PyDataloader(Ids(1 << 63), 3, num_workers=num_workers, items_in_parallel=items_in_parallel)
    for ask in (len, iter):
        with pytest.raises(OverflowError):
            ask(too_long)


def test_shuffled_millions_need_no_table(measured):
    """Ten million samples in random order: the epoch starts in milliseconds, and holds no array of indices."""
    seconds, grown = measured("""
        loader = load(Ids(10_000_000), 32, shuffle=True)
        next(iter(loader))
        before = resident()
        times = []
        for _ in range(5):
            start = time.perf_counter()
            batches = iter(loader)
            next(batches)
            times.append(time.perf_counter() - start)
        print(json.dumps([min(times), resident() - before]))
        """, 2)
    assert seconds < 0.05 and grown < 5 * MB


@every_size
def test_memory_is_flat_over_epochs(measured, num_workers, items_in_parallel):
    """As many blocks of memory are in use after 120 epochs, a third of them left early, as after 20."""
    blocks = measured("""
        class Boxes(Ids):
            def __getitem__(self, index):
                return [index, str(index), {"index": index + 1000}]

        loader = load(Boxes(64), 4, collate_fn=tuple)
        def epochs(count):
            for number in range(count):
                for batch in loader:
                    if number % 3 == 0:
                        break
                for batch in load(Boxes(8), 4):
                    pass
        def in_use():
            # Dropped workers end in the background.
            deadline = time.monotonic() + 5
            while num_threads() > threads and time.monotonic() < deadline:
                time.sleep(0.001)
            for _ in range(3):
                gc.collect()
            return sys.getallocatedblocks()
        epochs(1)
        threads = 1 + max(num_workers, 1) * items_in_parallel if num_workers or items_in_parallel > 1 else 1
        found = []
        for _ in range(6):
            epochs(20)
            found.append(in_use())
        print(json.dumps(found))
        """, num_workers, items_in_parallel)
    # An object kept for each epoch would be 100 blocks. The loaders ready batches ahead come to some too.
    assert min(blocks[3:]) - max(blocks[:2]) < 60, blocks


@every_size
def test_resident_memory_is_flat_over_epochs(measured, num_workers, items_in_parallel):
    """Epochs of 16 MB each: the process is as large after 100 of them as after 20."""
    sizes = measured("""
        class Blocks(Ids):
            def __getitem__(self, index):
                return bytearray(65536)

        # The C library keeps freed blocks in an arena for each thread, more or less as the threads happened to run.
        give_back = getattr(ctypes.CDLL(None), "malloc_trim", lambda size: None)
        loader = load(Blocks(256), 8)
        sizes = []
        for _ in range(6):
            for _ in range(20):
                for batch in loader:
                    pass
            give_back(0)
            sizes.append(resident())
        print(json.dumps(sizes))
        """, num_workers, items_in_parallel)
    # A batch kept for each epoch would be 10 MB from each size to the next.
    assert min(sizes[3:]) - max(sizes[:2]) < (20 if FREE_THREADED else 8) * MB, sizes


@pytest.mark.parametrize("consumer", ["fast", "slow"])
def test_memory_does_not_creep_between_threads(measured, consumer):
    """B23: what workers make and the consumer frees, 5000 batches of it, does not add up.

    Free-threaded CPython keeps what it freed until each thread that runs Python has been at a certain point. While one
    waits for a processor, which may be long on a busy machine, the process grows: once, and not with each step.
    """
    sizes, collection = measured(f"""
        class Records(Ids):
            def __getitem__(self, index):
                return {{"x": bytes(4096), "y": index}}

        sizes = []
        batches = iter(load(Records(32 * 5010), 32))
        for number, batch in enumerate(batches):
            if number % 500 == 0:
                sizes.append(resident())
            if {consumer == "slow"} and number % 50 == 0:
                time.sleep(0.005)
            if number == 5000:
                break
        time.sleep(0.1)  # the queue is full
        start = time.perf_counter()
        gc.collect()
        print(json.dumps([sizes, time.perf_counter() - start]))
        """, 4)
    steps = [after - before for before, after in itertools.pairwise(sizes[1:])]
    assert len(steps) == 9
    assert FREE_THREADED or sizes[-1] - sizes[1] < 50 * MB, sizes
    # One batch of a hundred that is kept would be 0.7 MB.
    assert statistics.median(steps) < 0.5 * MB, sizes
    assert collection < 0.5


# ---- prefetching has a bound ----


@with_workers
@pytest.mark.parametrize("prefetch_depth", [1, 2, 5])
def test_prefetching_stops_at_its_bound(num_workers, items_in_parallel, prefetch_depth):
    """B21: with one batch taken, exactly 1 + num_workers + prefetch_depth batches are loaded, and no item more."""
    dataset = CountingDataset(4000)
    batches = iter(PyDataloader(dataset, 4, prefetch_depth, num_workers=num_workers,
                                items_in_parallel=items_in_parallel))
    for taken in (1, 2, 3):
        next(batches)
        bound = 4 * (taken + num_workers + prefetch_depth)
        assert eventually(lambda bound=bound: len(dataset.started) >= bound)
        time.sleep(0.02)  # in which nothing may happen
        assert sorted(dataset.started) == list(range(bound))
    assert dataset.most_running <= num_workers * items_in_parallel


@with_workers
@pytest.mark.parametrize("prefetch_depth", [1, 2])
def test_live_batches_never_exceed_the_bound(num_workers, items_in_parallel, prefetch_depth):
    """B21: never more than num_workers + prefetch_depth batches are alive, and the one that the consumer holds."""
    lock = threading.Lock()
    alive = most = 0

    class Batch(list):
        def __init__(self, samples) -> None:
            nonlocal alive, most
            super().__init__(samples)
            with lock:
                alive += 1
                most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            with lock:
                alive -= 1

    batches = iter(PyDataloader(Ids(1200), 4, prefetch_depth, num_workers=num_workers, collate_fn=Batch,
                                items_in_parallel=items_in_parallel))
    for number in range(300):
        batch = next(batches)
        if number % 50 == 0:
            time.sleep(0.005)  # the workers get as far ahead as they may
        del batch
    assert most <= num_workers + prefetch_depth + 1
    assert next(batches, None) is None
    assert alive == 0


@every_size
def test_huge_prefetch_depth_costs_nothing_up_front(num_workers, items_in_parallel):
    """B21: a depth of 1000 with 5 batches is fine, and so is one that no memory could hold."""
    for prefetch_depth in (1000, 2**31, 2**63, 10**30):
        loader = PyDataloader(Ids(10), 2, prefetch_depth, num_workers=num_workers,
                              items_in_parallel=items_in_parallel)
        assert list(loader) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


# ---- nothing is kept of a delivered batch ----

SHAPES = {
    "object": lambda index, mark: mark,
    "list": lambda index, mark: [[index, mark], bytes(3000)],
    "tuple": lambda index, mark: (index, (mark, "text" * index)),
    "dict": lambda index, mark: {"x": bytes(4096), "y": {str(index): mark}},
}


@every_size
@pytest.mark.parametrize("shape", SHAPES)
def test_dropped_batch_dies_while_its_worker_sleeps(no_collection, shape, num_workers, items_in_parallel):
    """A batch that the consumer drops is freed at once, leaves and all, with the iterator alive and workers parked."""
    dataset = Holder(12, SHAPES[shape])
    batches = iter(PyDataloader(dataset, 3, prefetch_depth=9, num_workers=num_workers,
                                items_in_parallel=items_in_parallel))
    for taken in range(1, 5):
        batch = next(batches)
        if num_workers > 0:
            assert eventually(lambda: len(dataset.marks) == 12)
        expected = dataset.alive() - 3
        del batch
        # A worker that has just handed its batch over may still hold a reference for a few instructions.
        assert eventually(lambda expected=expected: dataset.alive() == expected, 2.0), (taken, dataset.alive())


@every_size
def test_dropped_array_dies_with_what_it_looks_into(no_collection, num_workers, items_in_parallel):
    """The same for NumPy arrays: a batch of views frees the large array behind them, also with collate_fn."""
    bases: list[weakref.ref] = []

    class Views(Ids):
        def __getitem__(self, index: int):
            base = np.full((64, 64), index)
            bases.append(weakref.ref(base))
            return base[1:, ::2], base.T

    def collate(samples: list) -> dict:
        stacked = np.stack([sample[0] for sample in samples])
        bases.append(weakref.ref(stacked))
        return {"stacked": stacked[:, 0], "views": samples}

    for collate_fn in (None, collate):
        bases.clear()
        loader = PyDataloader(Views(12), 3, prefetch_depth=9, num_workers=num_workers,
                              items_in_parallel=items_in_parallel, collate_fn=collate_fn)
        batches = iter(loader)
        for batch in batches:
            del batch
        assert eventually(lambda: not any(base() is not None for base in bases), 2.0)
        del batches


@pytest.mark.parametrize("sample", [
    '{"blob": b"x" * (1 << 20)}', 'np.frombuffer(b"x" * (1 << 20), np.uint8).reshape(1024, 1024)'])
def test_dropped_bytes_are_given_back_while_workers_sleep(measured, sample):
    """The same for bytes, which have no weak references, also behind two arrays: 64 MB that the consumer drops are free
    at once."""
    full, empty = measured(f"""
        import tracemalloc
        import numpy as np
        gc.disable()
        tracemalloc.start()
        class Blobs(Ids):
            def __getitem__(self, index):
                return {sample}
        loader = load(Blobs(64), 4)
        batches = iter(loader)
        held = list(batches)
        full = tracemalloc.get_traced_memory()[0]
        del held
        time.sleep(0.1)
        print(json.dumps([full, tracemalloc.get_traced_memory()[0]]))
        """, 2)
    assert full > 64 * MB and empty < 2 * MB, (full, empty)


@every_size
def test_failed_batch_is_forgotten(num_workers, items_in_parallel):
    """Once the consumer is done with an exception, nobody keeps it, nor the samples of its batch."""

    class Bad(Exception):
        pass

    dataset = FailingDataset(8, {3: Bad("bad sample")})
    gone = weakref.ref(dataset.errors[3])
    batches = iter(PyDataloader(dataset, 2, num_workers=num_workers, items_in_parallel=items_in_parallel))
    assert next(batches) == [0, 1]
    with pytest.raises(Bad):
        next(batches)
    assert list(batches) == [[4, 5], [6, 7]]
    dataset.errors.clear()
    assert eventually(lambda: gc.collect() >= 0 and gone() is None, 2.0)


@every_size
@pytest.mark.parametrize("defer_refcount", [True, False])
def test_deleted_loader_and_dataset_are_freed(num_workers, items_in_parallel, defer_refcount):
    """``del loader, dataset; gc.collect()`` frees both, and collate_fn, after an epoch and in the middle of one."""

    class Collate:
        def __call__(self, samples: list) -> list:
            return samples

    before = worker_threads()
    dataset, collate = Ids(20), Collate()
    loader = PyDataloader(dataset, 2, num_workers=num_workers, items_in_parallel=items_in_parallel,
                          collate_fn=collate, defer_refcount=defer_refcount)
    list(loader)
    batches = iter(loader)
    next(batches)
    gone = [weakref.ref(thing) for thing in (loader, dataset, collate, batches)]
    del loader, dataset, collate, batches
    assert eventually(lambda: worker_threads() <= before)
    gc.collect()
    assert [thing() for thing in gone] == [None] * 4


@every_size
def test_loader_in_a_cycle_with_its_dataset_is_collected(num_workers, items_in_parallel):
    """A dataset that holds its loader and an iterator of it goes at a collection, threads and all."""
    before = worker_threads()
    dataset = Ids(100)
    dataset.loader = PyDataloader(dataset, 2, num_workers=num_workers, items_in_parallel=items_in_parallel)
    dataset.batches = iter(dataset.loader)
    next(dataset.batches)
    gone = weakref.ref(dataset)
    del dataset
    assert eventually(lambda: gc.collect() >= 0 and gone() is None and worker_threads() <= before, 5.0)


# ---- what cannot be pickled ----

UNPICKLABLE = """
import sys, tempfile, threading
from dataloader_rs import PyDataloader, PyDataset

def main():
    class Local(PyDataset):
        def __init__(self, file):
            self.file = file
            self.lock = threading.Lock()
            self.numbers = (number for number in range(1000))
            self.module = sys
            self.function = lambda index: index + 1
        def __len__(self):
            return 40
        def __getitem__(self, index):
            with self.lock:
                next(self.numbers)
                seen.append(self)
            return self.function(index)
    seen = []
    with tempfile.TemporaryFile() as file:
        dataset = Local(file)
        loader = PyDataloader(dataset, 2, num_workers=4, collate_fn=lambda batch: batch[0])
        assert list(loader) == list(range(1, 41, 2))
    assert len(seen) == 40 and all(one is dataset for one in seen)
    print("done")

main()
"""


@pytest.mark.parametrize("how", ["script", "command", "standard input"])
def test_dataset_that_cannot_be_pickled_works(tmp_path, how):
    """B53: local classes, lambdas, open files, locks and generators, without a ``__main__`` guard, are all fine."""
    script = tmp_path / "script.py"
    script.write_text(UNPICKLABLE)
    arguments = {"script": [str(script)], "command": ["-c", UNPICKLABLE], "standard input": ["-"]}[how]
    finished = subprocess.run([sys.executable, "-W", "error", *arguments], input=UNPICKLABLE, capture_output=True,
                              text=True, timeout=30)
    assert (finished.stdout, finished.stderr, finished.returncode) == ("done\n", "", 0)
