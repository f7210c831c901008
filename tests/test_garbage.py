"""What waits in the reorder buffer is no root: cycles that lead through it are collected."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
from conftest import eventually
from toy_datasets import Calls, CountingDataset, FailingDataset, GatedDataset, Ids

from dataloader_rs import PyDataloader, PyIterableDataset


def is_collected(reference: weakref.ref) -> bool:
    return eventually(lambda: gc.collect() >= 0 and reference() is None)


class OneError(CountingDataset):
    """Raises the same object for every item, as a dataset with a broken file does."""

    def __init__(self, length: int, error: Exception) -> None:
        super().__init__(length)
        self.error = error

    def fetch(self, index: int) -> int:
        raise self.error


class Answers(CountingDataset):
    """Every sample is `answer`."""

    answer: object = None

    def fetch(self, index: int) -> object:
        return self.answer


class GatedAnswers(GatedDataset):
    answer: object = None

    def fetch(self, index: int) -> object:
        super().fetch(index)
        return self.answer


def test_prefetched_error_that_leads_back_to_its_iterator_is_collected():
    """An error caught once leads, through its traceback and this frame, to the iterator that holds it again."""

    def caught_once() -> weakref.ref:
        dataset = OneError(4, ValueError("again"))
        iterator = iter(PyDataloader(dataset, num_workers=1))
        try:
            next(iterator)
        except ValueError:
            pass
        # Item 3 is asked for once the errors of 1 and 2 lie in the buffer.
        dataset.wait_until_started({3})
        return weakref.ref(iterator)

    assert is_collected(caught_once())


def test_prefetched_batch_that_holds_its_iterator_is_collected():
    """Samples may be anything, the iterator too."""
    dataset = Answers(4)
    iterator = iter(PyDataloader(dataset, num_workers=1))
    dataset.answer = iterator
    next(iterator)
    dataset.wait_until_started({3})
    dataset.answer = None
    reference = weakref.ref(iterator)
    del iterator
    assert is_collected(reference)


def test_finished_item_that_holds_its_iterator_is_collected():
    """So may the finished items of a batch that will never be whole, because the loader was closed."""
    dataset = GatedAnswers(4, closed={1, 2})
    loader = PyDataloader(dataset, batch_size=4, num_workers=1, items_in_parallel=2)
    iterator = iter(loader)
    dataset.answer = iterator
    dataset.wait_until_started({1, 2})
    pool = loader._pools.here().started(2, True)
    closing = threading.Thread(target=loader.close)
    closing.start()
    assert eventually(lambda: not pool.usable)
    dataset.open()
    closing.join()
    dataset.answer = None
    reference = weakref.ref(iterator)
    del iterator
    assert is_collected(reference)


def test_objects_in_the_buffer_survive_a_collection():
    """The collector takes nothing that is still to be delivered."""
    dataset = CountingDataset(6)
    iterator = iter(PyDataloader(dataset, batch_size=2, num_workers=1, collate_fn=lambda batch: [batch, batch]))
    dataset.wait_until_started({5})
    for _ in range(3):
        gc.collect()
    assert list(iterator) == [[[0, 1]] * 2, [[2, 3]] * 2, [[4, 5]] * 2]


def test_errors_in_the_buffer_survive_a_collection():
    """Nor an exception, with all that hangs on it."""
    errors = {index: ValueError(index) for index in range(3)}
    iterator = iter(PyDataloader(FailingDataset(3, errors), num_workers=2))
    for index in range(3):
        gc.collect()
        try:
            next(iterator)
        except ValueError as error:
            assert error is errors[index]


# ---- nothing is left for the collector ----


class Error(Exception):
    pass


def breaking_off(length: int, last: object = None):
    """The numbers below `length`, then `last`, then an error."""
    yield from range(length)
    if last is not None:
        yield last
    raise Error(length)


def fourth_fails(index: int) -> int:
    if index == 4:
        raise Error(index)
    return index


class Unsized:
    """A sampler that is read as it is needed."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self):
        return breaking_off(self.length)


class Sized(Unsized):
    def __len__(self) -> int:
        return self.length + 1


class Shards(PyIterableDataset):
    def shards(self, num_shards: int) -> list:
        return [breaking_off(5 + number) for number in range(num_shards)]

    def __iter__(self):
        return breaking_off(5)


LOADERS_THAT_FAIL = {
    "item": lambda **options: PyDataloader(Calls(9, fourth_fails), **options),
    "sized sampler": lambda **options: PyDataloader(Ids(9), sampler=Sized(5), **options),
    "sampler": lambda **options: PyDataloader(Ids(9), sampler=Unsized(5), **options),
    "long sampler": lambda **options: PyDataloader(Ids(70_000), 1000, sampler=Unsized(69_000), **options),
    "wrong index": lambda **options: PyDataloader(Ids(9), sampler=[0, "text"], **options),
    "large index": lambda **options: PyDataloader(Ids(9), sampler=breaking_off(0, 2**70), **options),
    "negative index": lambda **options: PyDataloader(Ids(9), sampler=[0, -1], **options),
    "batch_sampler": lambda **options: PyDataloader(Ids(9), batch_sampler=[[0], [1, "text"]], **options),
    "stream": lambda **options: PyDataloader(Shards(), 2, **options),
    "stream in any order": lambda **options: PyDataloader(Shards(), 2, in_order=False, **options),
    "collate_fn": lambda **options: PyDataloader(Ids(4), collate_fn=breaking_off(0).send, **options),
}


def refusing_worker(worker_id: int) -> None:
    raise Error(worker_id)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", LOADERS_THAT_FAIL)
def test_error_that_was_caught_leaves_no_cycle(kind, num_workers):
    """A loader that raised is gone with its last reference, and its workers end: no object of ours keeps the error."""

    def caught() -> weakref.ref:
        loader = LOADERS_THAT_FAIL[kind](num_workers=num_workers)
        raised = False
        try:
            iterator = iter(loader)
            for _ in iterator:
                pass
        except (Error, TypeError, ValueError):
            raised = True
        assert raised
        return weakref.ref(loader.dataset)

    assert_gone_uncollected(caught)


@pytest.mark.parametrize("num_dropped", [0, 2])
@pytest.mark.parametrize("num_raising", [1, 3])
@pytest.mark.parametrize("dataset", [Ids, lambda length: Shards()], ids=["items", "stream"])
def test_error_of_worker_init_fn_that_was_caught_leaves_no_cycle(dataset, num_raising, num_dropped):
    """So with what worker_init_fn raised, once all iterators that waited for the workers have raised it or are gone."""

    def caught() -> weakref.ref:
        loader = PyDataloader(dataset(4), num_workers=2, worker_init_fn=refusing_worker)
        iterators = [iter(loader) for _ in range(num_raising + num_dropped)]
        del iterators[num_raising:]
        for iterator in iterators:
            raised = False
            try:
                next(iterator)
            except Error:
                raised = True
            assert raised
        return weakref.ref(loader.dataset)

    assert_gone_uncollected(caught)


def assert_gone_uncollected(caught) -> None:
    """What ``caught()`` refers to is freed by itself."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        reference = caught()
        assert eventually(lambda: reference() is None)
    finally:
        if was_enabled:
            gc.enable()
