"""across_epochs: workers go on into the next epoch, and nothing else changes."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
from conftest import eventually, run_threaded
from toy_datasets import CountingDataset, GatedDataset, Ids

from dataloader_rs import PyDataloader, PyIterableDataset
from dataloader_rs.ahead import EpochAhead

every_size = pytest.mark.parametrize(("num_workers", "items_in_parallel"), [(0, 1), (1, 1), (4, 1), (2, 3)])


def load(dataset, batch_size: int, num_workers: int = 2, items_in_parallel: int = 1, **arguments) -> PyDataloader:
    return PyDataloader(dataset, batch_size, num_workers=num_workers, items_in_parallel=items_in_parallel,
                        across_epochs=True, **arguments)


class Slow(Ids):
    """Items that wait 60 ms."""

    def __getitem__(self, index: int) -> int:
        time.sleep(0.06)
        return index


def test_first_batch_of_the_next_epoch_is_there():
    """B51: no wait at the start of epochs 2 to 5 where the loop gives workers time enough; much of one without."""
    waited = {}
    for across_epochs in (True, False):
        loader = PyDataloader(Slow(12), 4, num_workers=3, across_epochs=across_epochs)
        waits = []
        for _ in range(5):
            start = time.perf_counter()
            iterator = iter(loader)
            next(iterator)
            waits.append(time.perf_counter() - start)
            for _ in range(3):
                time.sleep(0.1)
                next(iterator, None)
        waited[across_epochs] = waits[1:]
    assert sorted(waited[True])[2] < 0.01, waited
    assert min(waited[False]) > 0.2, waited


@every_size
@pytest.mark.parametrize("arguments", [{}, {"shuffle": True, "seed": 4}, {"sampler": [3, 1, 2]}, {"drop_last": True},
                                       {"in_order": False}], ids=repr)
def test_epochs_are_the_same_with_it(num_workers, items_in_parallel, arguments):
    """Orders and numbers of epochs do not change."""
    across = load(Ids(23), 4, num_workers, items_in_parallel, **arguments)
    plain = PyDataloader(Ids(23), 4, **arguments)
    for _ in range(5):
        assert sorted(across) == sorted(plain) if "in_order" in arguments else list(across) == list(plain)


@every_size
def test_batch_samplers_work_too(num_workers, items_in_parallel):
    """Their end is seen late, and then the next epoch is begun."""
    batches = [[1, 2], [], [3]]
    loader = load(Ids(9), 1, num_workers, items_in_parallel, batch_sampler=batches)
    assert [list(loader) for _ in range(4)] == [batches] * 4


@every_size
def test_epochs_left_early_are_epochs(num_workers, items_in_parallel):
    """The k-th iter() is epoch k, finished or not."""
    loader = load(Ids(40), 4, num_workers, items_in_parallel, shuffle=True, seed=1)
    plain = PyDataloader(Ids(40), 4, shuffle=True, seed=1)
    orders = [list(plain) for _ in range(6)]
    for epoch in range(6):
        iterator = iter(loader)
        assert [next(iterator) for _ in range(1 + epoch)] == orders[epoch][:1 + epoch]


def test_two_epochs_are_loaded_ahead_no_further_than_one():
    """B21: num_workers + prefetch_depth batches, of both epochs together."""
    dataset = CountingDataset(6)
    loader = load(dataset, 1, 1, prefetch_depth=2)
    iterator = iter(loader)
    for delivered in range(1, 7):
        next(iterator)
        assert eventually(lambda delivered=delivered: len(dataset.started) == delivered + 3)
    assert dataset.started == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    with pytest.raises(StopIteration):
        next(iterator)
    time.sleep(0.02)
    assert len(dataset.started) == 9
    assert list(loader) == [[0], [1], [2], [3], [4], [5]]


@every_size
def test_other_length_drops_what_was_prepared(num_workers, items_in_parallel):
    """Nothing of the old length is served, and the number of the epoch is used again."""
    dataset = Ids(10)
    loader = load(dataset, 3, num_workers, items_in_parallel, shuffle=True, seed=2)
    list(loader)
    dataset.length = 20
    plain = PyDataloader(Ids(20), 3, shuffle=True, seed=2)
    list(plain)
    assert [list(loader), list(loader)] == [list(plain), list(plain)]


@every_size
def test_set_epoch_drops_what_was_prepared(num_workers, items_in_parallel):
    """B51: what was loaded before the call is not served after it."""

    class Versioned(Ids):
        version = 0

        def __getitem__(self, index: int) -> tuple[int, int]:
            return self.version, index

    dataset = Versioned(8)
    loader = load(dataset, 4, num_workers, items_in_parallel)
    assert [version for batch in loader for version, _ in batch] == [0] * 8
    if num_workers:
        time.sleep(0.02)  # time to load ahead
    dataset.version = 1
    loader.set_epoch(1)
    assert [version for batch in loader for version, _ in batch] == [1] * 8


def test_error_of_a_sampler_comes_from_its_own_iter():
    """Reading it early may fail; then it is read again when its epoch is begun."""

    class Fails:
        reads = 0

        def __iter__(self):
            self.reads += 1
            if self.reads in (2, 3):
                raise OSError("gone")
            return iter([0, 1])

        def __len__(self):
            return 2

    loader = load(Ids(2), 1, sampler=Fails())
    assert list(loader) == [[0], [1]]
    with pytest.raises(OSError, match="gone"):
        iter(loader)
    assert list(loader) == [[0], [1]]


def test_iterators_are_read_by_one_epoch_only():
    """A sampler that is an iterator is not read ahead."""
    loader = load(Ids(9), 1, sampler=iter([4, 2]))
    assert list(loader) == [[4], [2]]
    with pytest.warns(RuntimeWarning, match="yields nothing"):
        assert list(loader) == []


def test_closed_loader_begins_anew():
    """What was prepared on the old threads is dropped."""
    loader = load(Ids(8), 4, shuffle=True, seed=3)
    plain = PyDataloader(Ids(8), 4, shuffle=True, seed=3)
    assert list(loader) == list(plain)
    loader.close()
    assert [list(loader), list(loader)] == [list(plain), list(plain)]


def test_dropped_loader_drops_what_was_prepared():
    """No thread and no sample outlives it."""
    dataset = GatedDataset(8, closed={5})
    loader = load(dataset, 1)
    iterator = iter(loader)
    next(iterator)
    seen = weakref.ref(dataset)
    dataset.open()
    del loader, iterator, dataset
    assert eventually(lambda: gc.collect() >= 0 and seen() is None)


def test_threads_share_the_epochs_of_a_loader():
    """Each iter() gets an epoch of its own, and none is lost."""
    loader = load(Ids(12), 12, shuffle=True, seed=5)
    plain = PyDataloader(Ids(12), 12, shuffle=True, seed=5)
    found = run_threaded(lambda number: [batch for _ in range(10) for batch in loader], 4)
    assert sorted(sum(found, [])) == sorted(list(plain)[0] for _ in range(40))


def test_streams_refuse_it():
    """What a stream gives next is not known before it is read."""
    with pytest.raises(ValueError, match="across_epochs is not for an iterable dataset"):
        load(PyIterableDataset.of("abc"), 1)


@every_size
def test_epochs_are_independent_of_those_that_nobody_finishes(num_workers, items_in_parallel):
    """Peeking at an epoch, or going through two of them side by side, holds up neither."""
    loader = load(Ids(40), 4, num_workers, items_in_parallel)
    batches = [list(range(first, first + 4)) for first in range(0, 40, 4)]
    peeked = iter(loader)
    assert next(peeked) == batches[0]
    assert list(loader) == batches
    assert list(zip(iter(loader), iter(loader), strict=True)) == list(zip(batches, batches, strict=True))
    assert list(peeked) == batches[1:]


def test_sampler_that_is_told_epochs_is_not_read_early():
    """``sampler.set_epoch(k)`` before the epoch is torch's way; the order must be that of k."""

    class Told:
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self):
            return iter([self.epoch, self.epoch + 1])

        def __len__(self):
            return 2

    for arguments in ({"sampler": Told()}, {"batch_sampler": Told()}):
        sampler = next(iter(arguments.values()))
        if "batch_sampler" in arguments:
            sampler.__class__.__iter__ = lambda self: iter([[self.epoch], [self.epoch + 1]])
        loader = load(Ids(9), 1, **arguments)
        for epoch in range(4):
            sampler.set_epoch(epoch)
            assert list(loader) == [[epoch], [epoch + 1]]


def test_close_drops_the_samples_that_were_prepared():
    """But not the number of their epoch."""

    class Weak(set):
        pass

    made: weakref.WeakSet = weakref.WeakSet()

    class Makes(Ids):
        def __getitem__(self, index: int) -> Weak:
            sample = Weak()
            made.add(sample)
            return sample

        __hash__ = object.__hash__

    Weak.__hash__ = object.__hash__
    loader = load(Makes(4), 1)
    for _ in loader:
        pass
    assert eventually(lambda: len(made) > 0)
    loader.close()
    del _
    assert eventually(lambda: gc.collect() >= 0 and not made)


def test_no_number_is_lost_when_preparing_is_interrupted():
    """Ctrl-C, or an error after the number was taken: the epochs that follow are those that would have."""
    numbers = iter(range(100))
    errors: list[BaseException | None] = [None, KeyboardInterrupt(), None, MemoryError(), None, None, None, None]

    def start(take_epoch, after):
        number = take_epoch()
        error = errors.pop(0)
        if error is not None:
            raise error
        return f"iterator {number}", number

    ahead = EpochAhead()
    with pytest.raises(KeyboardInterrupt):
        ahead.next("pool", 3, numbers.__next__, start)
    assert [ahead.next("pool", 3, numbers.__next__, start) for _ in range(4)] == [
        "iterator 0", "iterator 1", "iterator 2", "iterator 3"]
