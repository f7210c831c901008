"""timeout: a batch that does not come is an exception that tells what it waits for, and nothing is lost."""

from __future__ import annotations

import math
import threading
import time

import pytest
from toy_datasets import PATIENCE, GatedDataset, Ids

from dataloader_rs import BatchTimeoutError, PyDataloader, PyIterableDataset


def patient_next(iterator):
    """The next batch, however often a busy machine is too slow for the timeout of the loader."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return next(iterator)
        except BatchTimeoutError:
            assert time.monotonic() < deadline


def patient_list(iterator) -> list:
    """All batches that are left, likewise."""
    batches = []
    while True:
        try:
            batches.append(patient_next(iterator))
        except StopIteration:
            return batches


with_threads = pytest.mark.parametrize(("num_workers", "items_in_parallel"), [(1, 1), (2, 1), (2, 3)])


@with_threads
def test_stuck_item_is_named_and_comes_later(num_workers, items_in_parallel):
    """B63: both kinds of exception, the index, the worker and its line; the next next() waits for the same batch."""
    dataset = GatedDataset(10, closed={5})
    loader = PyDataloader(dataset, num_workers=num_workers, items_in_parallel=items_in_parallel, timeout=0.3)
    iterator = iter(loader)
    assert [patient_next(iterator) for _ in range(5)] == [[index] for index in range(5)]
    for _ in range(2):
        start = time.monotonic()
        with pytest.raises(BatchTimeoutError) as caught:
            next(iterator)
        assert 0.3 <= time.monotonic() - start < PATIENCE
        assert isinstance(caught.value, TimeoutError) and isinstance(caught.value, RuntimeError)
        message = str(caught.value)
        assert "no batch within 0.3 s: worker " in message
        assert "index 5 (position 0 of batch 5)" in message
        assert "gate.wait(PATIENCE)" in message
    assert len(iterator) == 5
    dataset.open()
    assert patient_list(iterator) == [[5], [6], [7], [8], [9]]


def test_item_of_a_larger_batch_is_named():
    """The item that is asked for stands before the indices of its batch."""
    dataset = GatedDataset(8, closed={6})
    iterator = iter(PyDataloader(dataset, 4, num_workers=1, timeout=0.05))
    patient_next(iterator)
    dataset.wait_until_started({6})
    with pytest.raises(BatchTimeoutError, match=r"worker 0 is at index 6 of indices \[4, 5, 6, 7\] \(batch 1\)"):
        next(iterator)
    dataset.open()
    assert patient_next(iterator) == [4, 5, 6, 7]


def test_stuck_iterator_can_be_dropped_at_once():
    """B63: nobody waits for the item that is stuck."""
    dataset = GatedDataset(4, closed={0})
    loader = PyDataloader(dataset, num_workers=2, timeout=0.05)
    iterator = iter(loader)
    with pytest.raises(BatchTimeoutError):
        next(iterator)
    start = time.monotonic()
    del iterator, loader
    assert time.monotonic() - start < 1
    dataset.open()


def test_slow_consumer_is_no_reason():
    """B63: the time counts from the call of next()."""
    iterator = iter(PyDataloader(Ids(10), num_workers=2, timeout=0.2))
    for expected in range(3):
        time.sleep(0.25)
        assert next(iterator) == [expected]


def test_stuck_stream_is_named():
    """The batch of the stream, since there is no index."""
    go_on, waits = threading.Event(), threading.Event()

    class Stuck(PyIterableDataset):
        def __iter__(self):
            yield 0
            waits.set()
            assert go_on.wait(PATIENCE)
            yield 1

    iterator = iter(PyDataloader(Stuck(), num_workers=2, timeout=0.05))
    assert patient_next(iterator) == [0]
    assert waits.wait(PATIENCE)
    with pytest.raises(BatchTimeoutError, match="is at batch 1 of the stream; its stack:(.|\n)*go_on.wait"):
        next(iterator)
    go_on.set()
    assert patient_list(iterator) == [[1]]


def test_batch_that_no_worker_has_begun_is_told_so():
    """All workers are busy with another epoch of the loader."""
    dataset = GatedDataset(4, closed={0, 1})
    loader = PyDataloader(dataset, num_workers=2, timeout=0.05, adaptive=False)
    first = iter(loader)
    dataset.wait_until_started({0, 1})
    second = iter(loader)
    with pytest.raises(BatchTimeoutError, match="no worker is at it"):
        next(second)
    dataset.open()
    assert patient_list(first) == patient_list(second) == [[0], [1], [2], [3]]


@pytest.mark.parametrize(("value", "error"), [
    (-1, ValueError), (math.nan, ValueError), (math.inf, ValueError), (10**400, ValueError), ("1", TypeError),
    (True, TypeError), (None, TypeError)])
def test_wrong_timeout_is_an_error(value, error):
    """The message names the argument."""
    with pytest.raises(error, match="timeout must be"):
        PyDataloader(Ids(4), num_workers=1, timeout=value)


def test_timeout_needs_workers():
    """B63: a clear ValueError, not an assertion; 0 is no timeout."""
    with pytest.raises(ValueError, match=r"timeout needs num_workers > 0, got timeout=1 with num_workers=0"):
        PyDataloader(Ids(4), timeout=1)
    assert list(PyDataloader(Ids(2), timeout=0)) == [[0], [1]]


def test_worker_that_does_not_start_is_told_so():
    """The time counts for worker_init_fn too."""
    go_on = threading.Event()
    loader = PyDataloader(Ids(4), num_workers=2, timeout=0.05, worker_init_fn=lambda worker_id: go_on.wait(PATIENCE))
    iterator = iter(loader)
    for _ in range(2):
        with pytest.raises(BatchTimeoutError, match="worker_init_fn has not returned on all workers"):
            next(iterator)
    go_on.set()
    assert patient_list(iterator) == [[0], [1], [2], [3]]


def test_item_that_iterates_another_loader_is_named_itself():
    """Not the item of the inner loader, which runs on the same thread."""
    inner = GatedDataset(4, closed={3})

    class Outer(Ids):
        def __getitem__(self, index: int) -> list:
            return list(PyDataloader(inner, 4)) if index == 21 else []

    iterator = iter(PyDataloader(Outer(30), 2, sampler=[20, 21], num_workers=1, timeout=0.2))
    inner.wait_until_started({3})
    with pytest.raises(BatchTimeoutError, match=r"is at index 21 of indices \[20, 21\]"):
        next(iterator)
    inner.open()
    assert patient_next(iterator) == [[], [[0, 1, 2, 3]]]


def test_anything_that_is_a_float_is_a_timeout():
    """Numbers of other libraries."""

    class Seconds:
        def __float__(self) -> float:
            return 5.0

    assert list(PyDataloader(Ids(2), num_workers=1, timeout=Seconds())) == [[0], [1]]
