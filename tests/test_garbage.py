"""What waits in the reorder buffer is no root: cycles that lead through it are collected."""

from __future__ import annotations

import gc
import threading
import weakref

from conftest import eventually
from toy_datasets import CountingDataset, FailingDataset, GatedDataset

from dataloader_rs import PyDataloader


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
