"""Pools and iterators at the edges of their lives: made twice at once, closed, ended by hand, asked too late."""

from __future__ import annotations

import gc
import signal
import sys
import threading

import pytest
from conftest import FREE_THREADED, eventually, run_threaded, worker_threads
from reference import drained
from toy_datasets import FailingDataset, GatedDataset, Ids

from dataloader_rs import PyDataloader, PyDataset
from dataloader_rs.worker_info import Crew


def test_threads_that_start_a_loader_at_once_share_one_pool():
    """Fails where two pools are made and close() knows one of them."""
    for _ in range(50):
        loader = PyDataloader(Ids(4), num_workers=1)
        pools = run_threaded(lambda _, pools=loader._pools: pools.here().started(1, True), 3)
        assert len(set(map(id, pools))) == 1
        loader.close()
        pools = run_threaded(lambda _, pools=loader._pools: pools.here().started(1, True), 3)
        assert len(set(map(id, pools))) == 1


def test_finished_iterator_of_a_closed_loader_stays_finished(num_workers):
    """Closing takes nothing from an iterator that has nothing left."""
    loader = PyDataloader(Ids(2), num_workers=num_workers)
    iterator = iter(loader)
    assert [next(iterator), next(iterator)] == [[0], [1]]
    loader.close()
    with pytest.raises(StopIteration):
        next(iterator)


def test_iterator_of_a_closed_loader_is_a_runtime_error(num_workers):
    """With any number of workers, and a new epoch works."""
    loader = PyDataloader(Ids(2), num_workers=num_workers)
    iterator = iter(loader)
    loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(iterator)
    assert list(loader) == [[0], [1]]


def test_workers_that_never_had_work_leave_nothing_behind():
    """With the GIL they never enter Python. Fails where the last one to end, the loader being gone, keeps the crew."""

    def num_crews() -> int:
        gc.collect()
        return sum(type(found) is Crew for found in gc.get_objects())

    crews, threads = num_crews(), worker_threads()
    for num_workers in (1, 2, 4) * 30:
        assert list(PyDataloader(Ids(0), num_workers=num_workers)) == []
    assert eventually(lambda: worker_threads() <= threads)
    # Of workers before this test the system may have run some only now: till then they had no name to be seen by.
    assert eventually(lambda: num_crews() <= crews), (num_crews(), crews)


def test_finalizer_called_by_hand_inside_next_does_nothing():
    """A signal handler ends the iterator that its thread waits for. Fails (crashes) where __del__ frees the epoch."""
    dataset = GatedDataset(2, closed={0})
    iterator = iter(PyDataloader(dataset, num_workers=1))

    def handler(number, frame):
        iterator.__del__()
        dataset.open()

    previous = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert list(iterator) == [[0], [1]]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_finalizer_called_by_hand_ends_the_epoch(num_workers):
    """Outside next() it is what a drop would do."""
    iterator = iter(PyDataloader(Ids(8), num_workers=num_workers))
    assert next(iterator) == [0]
    iterator.__del__()
    assert list(iterator) == []


def test_loader_closed_by_what_its_worker_drops_is_a_runtime_error():
    """A worker cannot wait for itself, also not while its threading.local is cleared. Fails (hangs) otherwise."""
    seen = []
    local = threading.local()

    class Closes:
        def __del__(self):
            try:
                loader.close()
            except RuntimeError as error:
                seen.append(str(error))

    class Keeps(Ids):
        def __getitem__(self, index):
            local.kept = Closes()
            return index

    loader = PyDataloader(Keeps(1), num_workers=1)
    assert list(loader) == [[0]]
    loader.close()
    assert seen == ["a loader cannot be closed by its own worker"]


def test_epoch_that_a_worker_is_refused_is_not_counted():
    """The orders of a seed do not depend on what a worker tried."""

    class Iterates(Ids):
        loader = None

        def __getitem__(self, index):
            with pytest.raises(RuntimeError, match="own worker"):
                iter(self.loader)
            return index

    dataset = Iterates(20)
    dataset.loader = PyDataloader(dataset, 20, shuffle=True, seed=3, num_workers=1)
    epochs = [list(dataset.loader) for _ in range(3)]
    expected = PyDataloader(Ids(20), 20, shuffle=True, seed=3)
    assert epochs == [list(expected) for _ in range(3)]
    dataset.loader = None


def test_list_of_a_loader_whose_sampler_refuses_its_length_works(num_workers):
    """list() asks for a length, and takes a TypeError for "not known", but nothing else."""

    class Refuses:
        def __iter__(self):
            return iter([2, 0])

        def __len__(self):
            raise NotImplementedError

    loader = PyDataloader(Ids(3), sampler=Refuses(), num_workers=num_workers)
    assert list(loader) == [[2], [0]]
    with pytest.raises(TypeError, match="does not say how long it is"):
        len(loader)


def test_interrupt_while_a_note_is_added_is_not_lost(num_workers):
    """Ctrl-C comes out even there, and the exception of the batch is its cause."""

    class Slow(Exception):
        def add_note(self, note):
            raise KeyboardInterrupt

    error = Slow()
    with pytest.raises(KeyboardInterrupt) as caught:
        next(iter(PyDataloader(FailingDataset(1, {0: error}), num_workers=num_workers)))
    assert caught.value.__cause__ is error


def test_dataset_that_the_collector_finished_off_is_not_asked_any_more():
    """A cycle of dataset and iterator, collected while workers look for work.

    Fails where a run is claimed before anything keeps the dataset: more than half of the rounds then. What is left are
    rounds in which the dataset's own ``__del__`` lets a worker run before the iterator's turn comes.
    """
    rounds, asked_after = 60, []

    class Finished(PyDataset):
        finished = False

        def __len__(self):
            return 10**6

        def __getitem__(self, index):
            if self.finished:
                asked_after.append(index)
            return index

        def __del__(self):
            self.finished = True

    for _ in range(rounds):
        dataset = Finished()
        dataset.iterator = iter(PyDataloader(dataset, num_workers=2))
        next(dataset.iterator)
        del dataset
        gc.collect()
    assert len(asked_after) <= rounds // 4


@pytest.mark.parametrize("size", [(0, 1), (2, 1), (2, 2), (0, 2)])
def test_recursion_error_inside_next_does_not_stop_the_epoch(size):
    """A next() with little stack left raises, and the iterator goes on. Fails (hangs) where two counts part."""
    num_workers, items_in_parallel = size
    errors = {index: ValueError(index) for index in range(0, 400, 2)}
    iterator = iter(PyDataloader(FailingDataset(400, errors), num_workers=num_workers,
                                 items_in_parallel=items_in_parallel))

    def dive(depth):
        return next(iterator) if depth == 0 else dive(depth - 1)

    limit = sys.getrecursionlimit()
    for depth in range(limit - 100, limit):
        try:
            dive(depth)
        except (ValueError, RecursionError):
            pass
    left = len(iterator)
    assert len(drained(iterator)) == left > 0
    assert len(iterator) == 0


@pytest.mark.skipif(FREE_THREADED, reason="CPython leaves locks of objects that another thread held locked in a child")
def test_process_forked_while_workers_are_born_can_load(run_script):
    """Fails (a hung child now and then, on 3.11) where a worker may hold a lock of the interpreter at the fork."""
    run_script("""
        import os
        from dataloader_rs import PyDataloader
        from toy_datasets import Ids
        for _ in range(150):
            loader = PyDataloader(Ids(50), 2, num_workers=8)
            iterator = iter(loader)
            child = os.fork()
            if child == 0:
                os._exit(len(list(loader)))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 25
        """, warnings="ignore", timeout=50)
