"""Datasets that are iterated: one reader at a time, samples and batches in order, an end that nobody knows before."""

from __future__ import annotations

import gc
import itertools
import threading
import warnings
import weakref

import pytest
from conftest import eventually
from toy_datasets import PATIENCE

from dataloader_rs import BatchTimeoutError, PyDataloader, PyIterableDataset

every_size = pytest.mark.parametrize("num_workers", [0, 1, 3, 4])
with_workers = pytest.mark.parametrize("num_workers", [1, 3, 4])


class Stream(PyIterableDataset[int]):
    """Gives the numbers below `length`."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


class SizedStream(Stream):
    """Says that it gives `said` numbers."""

    def __init__(self, length: int, said: int) -> None:
        super().__init__(length)
        self.said = said

    def __len__(self) -> int:
        return self.said


class Sharded(Stream):
    """Shard k of n gives the numbers k, k + n, k + 2 n ..."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.asked: list[int] = []

    def shards(self, num_shards: int):
        self.asked.append(num_shards)
        return [range(first, self.length, num_shards) for first in range(num_shards)]


class Torn(PyIterableDataset[int]):
    """Gives the numbers below `length`, then raises `error`.

    The class is not local to a test, because CPython 3.13t frees no class once there are threads, nor then what its
    methods close over: an error, and by its traceback the frame of the test.
    """

    def __init__(self, length: int, error: Exception) -> None:
        self.length = length
        self.error = error

    def __iter__(self):
        yield from range(self.length)
        raise self.error


class TornShards(PyIterableDataset[int]):
    """The first shard is torn after two numbers, the others are longer."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def shards(self, num_shards: int):
        return [Torn(2, self.error), *(range(100, 200) for _ in range(num_shards - 1))]


def chunks(length: int, size: int) -> list[list[int]]:
    return [list(range(first, min(first + size, length))) for first in range(0, length, size)]


@every_size
@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 46, 1000])
@pytest.mark.parametrize("batch_size", [1, 8])
def test_batches_come_in_the_order_of_the_stream(num_workers, length, batch_size):
    """B61: every sample once, a last batch that may be smaller, as if one thread had read it."""
    loader = PyDataloader(Stream(length), batch_size, num_workers=num_workers)
    for _ in range(2):
        assert list(loader) == chunks(length, batch_size)


@every_size
def test_last_smaller_batch_can_be_dropped(num_workers):
    """B61: drop_last leaves out one remainder, not one for each worker."""
    loader = PyDataloader(Stream(46), 8, num_workers=num_workers, drop_last=True)
    assert list(loader) == chunks(40, 8)
    assert list(PyDataloader(Stream(5), 8, num_workers=num_workers, drop_last=True)) == []


@every_size
def test_without_a_batch_size_samples_come_one_by_one(num_workers):
    """batch_size=None: single samples; collate_fn gets the sample."""
    assert list(PyDataloader(Stream(9), None, num_workers=num_workers)) == list(range(9))
    assert list(PyDataloader(Stream(9), None, num_workers=num_workers, collate_fn=str)) == list("012345678")


@every_size
def test_one_thread_at_a_time_is_inside_the_stream(num_workers):
    """A generator needs no lock, although all workers read from it; and one is made for each epoch."""
    made = []

    class Exclusive(PyIterableDataset):
        def __iter__(self):
            made.append(threading.get_ident())
            return self.numbers()

        def numbers(self):
            inside = threading.Lock()
            for number in range(300):
                assert inside.acquire(blocking=False)
                inside.release()
                yield number

    assert list(PyDataloader(Exclusive(), 4, num_workers=num_workers)) == chunks(300, 4)
    assert made == [threading.get_ident()]


@with_workers
def test_stream_is_read_on_while_a_batch_is_collated(num_workers):
    """collate_fn does not hold up the reading, nor does the consumer."""
    first = threading.Event()
    read = threading.Event()

    class Tells(PyIterableDataset):
        def __iter__(self):
            yield from range(4)
            read.set()
            yield from range(4, 8)

    def collate(batch):
        if batch[0] == 0 and num_workers > 1:
            assert read.wait(PATIENCE)
        first.set()
        return batch

    assert list(PyDataloader(Tells(), 2, num_workers=num_workers, collate_fn=collate)) == chunks(8, 2)
    assert first.is_set()


@every_size
def test_next_is_not_called_after_the_end(num_workers):
    """An iterator that would begin anew is not asked again once it has ended."""

    class EndsOnce:
        def __init__(self):
            self.left = 10
            self.ends = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.left -= 1
            if self.left >= 0:
                return self.left
            self.ends += 1
            raise StopIteration

    stream = EndsOnce()
    iterator = iter(PyDataloader(PyIterableDataset.of(stream), 4, num_workers=num_workers))
    assert list(iterator) == [[9, 8, 7, 6], [5, 4, 3, 2], [1, 0]]
    assert list(iterator) == []
    assert stream.ends == 1


@every_size
def test_no_more_is_read_than_may_be_fetched_ahead(num_workers):
    """At most num_workers + prefetch_depth batches are in memory."""
    read = itertools.count()
    last = [0]

    class Counted(PyIterableDataset):
        def __iter__(self):
            for number in read:
                last[0] = number
                yield number

    iterator = iter(PyDataloader(Counted(), 2, prefetch_depth=2, num_workers=num_workers))
    for delivered in range(1, 30):
        next(iterator)
        ahead = num_workers + 2 if num_workers else 0
        assert last[0] + 1 <= 2 * (delivered + ahead)


@every_size
def test_generator_is_closed_when_its_iterator_is_dropped(num_workers):
    """Dropping the iterator lets a generator go, as a loop over it would."""
    closed = threading.Event()

    class Closes(PyIterableDataset):
        def __iter__(self):
            try:
                yield from itertools.count()
            finally:
                closed.set()

    iterator = iter(PyDataloader(Closes(), 2, num_workers=num_workers))
    assert next(iterator) == [0, 1]
    assert not closed.is_set()
    del iterator
    gc.collect()
    assert closed.wait(PATIENCE)


@with_workers
def test_generator_is_closed_once_the_call_in_progress_returns(num_workers):
    """Nobody waits for it; whoever is in it lets it go."""
    inside, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    class Stuck(PyIterableDataset):
        def __iter__(self):
            try:
                yield 0
                inside.set()
                assert go_on.wait(PATIENCE)
                yield 1
            finally:
                closed.set()

    iterator = iter(PyDataloader(Stuck(), num_workers=num_workers))
    assert next(iterator) == [0]
    assert inside.wait(PATIENCE)
    del iterator
    assert not closed.is_set()
    go_on.set()
    assert eventually(closed.is_set)


@every_size
def test_error_takes_the_place_of_its_batch_and_ends_the_epoch(num_workers):
    """The object that was raised; its note says how much is lost; then the epoch is over."""
    error = OSError("torn")
    iterator = iter(PyDataloader(Torn(10, error), 4, num_workers=num_workers))
    assert [next(iterator), next(iterator)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(OSError) as caught:
        next(iterator)
    assert caught.value is error
    [note] = error.__notes__
    assert "batch 2 of the stream" in note and "2 samples that were read for it are lost" in note
    assert list(iterator) == []


@every_size
def test_error_of_collate_fn_costs_one_batch(num_workers):
    """The stream goes on."""

    def collate(batch):
        if 5 in batch:
            raise ValueError("five")
        return batch

    iterator = iter(PyDataloader(Stream(12), 4, num_workers=num_workers, collate_fn=collate))
    assert next(iterator) == [0, 1, 2, 3]
    with pytest.raises(ValueError) as caught:
        next(iterator)
    assert "raised for batch 1 of the stream" in caught.value.__notes__[0]
    assert list(iterator) == [[8, 9, 10, 11]]


@every_size
def test_error_of_iter_comes_from_iter(num_workers):
    """There is no epoch without an iterator."""

    class None_(PyIterableDataset):
        pass

    with pytest.raises(NotImplementedError, match="None_ must implement __iter__"):
        iter(PyDataloader(None_(), num_workers=num_workers))


@every_size
def test_lengths_are_those_that_the_stream_says(num_workers):
    """B61: len(loader) needs a __len__ of the dataset; the iterator counts down."""
    loader = PyDataloader(SizedStream(46, 46), 8, num_workers=num_workers)
    assert len(loader) == 6
    assert len(PyDataloader(SizedStream(46, 46), 8, num_workers=num_workers, drop_last=True)) == 5
    iterator = iter(loader)
    lengths = [len(iterator)]
    for _ in iterator:
        lengths.append(len(iterator))
    assert lengths == [6, 5, 4, 3, 2, 1, 0]
    unsized = PyDataloader(Stream(46), 8, num_workers=num_workers)
    with pytest.raises(TypeError):
        len(unsized)
    with pytest.raises(TypeError, match="not known"):
        len(iter(unsized))


@every_size
@pytest.mark.parametrize("said", [3, 100])
def test_length_that_is_wrong_is_warned_about_once(num_workers, said):
    """B61: all that the stream gives is delivered, and one warning has both numbers."""
    loader = PyDataloader(SizedStream(46, said), 8, num_workers=num_workers)
    iterator = iter(loader)
    with pytest.warns(RuntimeWarning, match=rf"len\(SizedStream\) is {said}, but it gave 46 samples") as caught:
        assert list(iterator) == chunks(46, 8)
    assert caught[0].filename == __file__
    assert len(iterator) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(loader) == chunks(46, 8)
        loader_left_early = PyDataloader(SizedStream(46, said), 8, num_workers=num_workers)
        assert next(iter(loader_left_early)) == list(range(8))


@pytest.mark.parametrize(("name", "value"), [
    ("shuffle", True), ("sampler", [1]), ("batch_sampler", [[1]]), ("items_in_parallel", 2)])
def test_arguments_for_an_index_are_refused(name, value):
    """A ValueError has the argument, the rule and the value."""
    with pytest.raises(ValueError, match=f"{name} is not for an iterable dataset"):
        PyDataloader(Stream(4), **{name: value})


@pytest.mark.parametrize("num_workers", [0, 1])
def test_shards_are_for_several_workers(num_workers):
    """With one reader the whole stream is read."""
    dataset = Sharded(20)
    assert list(PyDataloader(dataset, 8, num_workers=num_workers)) == chunks(20, 8)
    assert dataset.asked == []


@pytest.mark.parametrize("length", [0, 1, 5, 41, 500])
@pytest.mark.parametrize("num_workers", [2, 3])
def test_batches_of_shards_come_in_turns(num_workers, length):
    """Each worker has a shard of its own; the order of the batches is fixed; each sample comes once."""
    dataset = Sharded(length)
    loader = PyDataloader(dataset, 4, num_workers=num_workers)
    shards = [list(shard) for shard in dataset.shards(num_workers)]
    dataset.asked.clear()
    expected = []
    for first in range(0, max(map(len, shards)), 4):
        expected += [shard[first:first + 4] for shard in shards if shard[first:first + 4]]
    for _ in range(3):
        assert list(loader) == expected
    assert dataset.asked == [num_workers] * 3


def test_shards_are_read_in_parallel():
    """Two workers are inside their shards at once."""
    meet = threading.Barrier(2)

    class Meets(PyIterableDataset):
        def shards(self, num_shards):
            return [self.shard(k) for k in range(num_shards)]

        def shard(self, k):
            for number in range(5):
                meet.wait(PATIENCE)
                yield 10 * k + number

    assert list(PyDataloader(Meets(), num_workers=2)) == [[n] for k in range(5) for n in (k, 10 + k)]


def test_error_in_a_shard_ends_the_epoch_in_its_place():
    """Batches before it come, none after it does."""
    error = OSError("torn")
    iterator = iter(PyDataloader(TornShards(error), num_workers=2))
    assert [next(iterator) for _ in range(4)] == [[0], [100], [1], [101]]
    with pytest.raises(OSError) as caught:
        next(iterator)
    assert caught.value is error
    assert list(iterator) == []


def test_wrong_number_of_shards_is_an_error():
    """The message has both numbers."""

    class Two(PyIterableDataset):
        def shards(self, num_shards):
            return [[1], [2]]

    with pytest.raises(ValueError, match=r"Two\.shards\(3\) must return 3 iterables, got 2"):
        iter(PyDataloader(Two(), num_workers=3))


@every_size
def test_out_of_order_every_sample_comes_once(num_workers):
    """in_order=False works for streams too."""
    loader = PyDataloader(Stream(500), 3, num_workers=num_workers, in_order=False)
    assert sorted(itertools.chain.from_iterable(loader)) == list(range(500))


def test_out_of_order_shards_make_the_same_batches():
    """in_order=False changes the order of batches of shards, but not what they hold."""
    gate = threading.Event()

    def collate(samples):
        assert samples[0] != 0 or gate.wait(PATIENCE)
        return samples

    batches = iter(PyDataloader(Sharded(16), 4, num_workers=2, collate_fn=collate, in_order=False))
    assert next(batches) == [1, 3, 5, 7]
    gate.set()
    assert sorted(batches) == [[0, 2, 4, 6], [8, 10, 12, 14], [9, 11, 13, 15]]


def test_anything_iterable_can_be_adapted():
    """PyIterableDataset.of keeps what is one already, and refuses what cannot be iterated."""
    dataset = Stream(3)
    assert PyIterableDataset.of(dataset) is dataset
    adapted = PyIterableDataset.of({"a": 1, "b": 2})
    assert list(PyDataloader(adapted)) == [["a"], ["b"]]
    assert len(PyDataloader(adapted)) == 2
    with pytest.raises(TypeError, match="source must be iterable, got 5"):
        PyIterableDataset.of(5)


@with_workers
def test_epoch_that_was_read_to_its_end_leaves_nothing(num_workers):
    """The samples, the iterator and the dataset die with the last reference."""
    dataset = Stream(10)
    loader = PyDataloader(dataset, num_workers=num_workers)
    seen = weakref.ref(dataset)
    list(loader)
    del loader, dataset
    assert eventually(lambda: gc.collect() >= 0 and seen() is None)


@with_workers
def test_out_of_order_error_comes_after_what_was_read_before_it(num_workers):
    """Batches that were read whole are delivered, however long they take to be collated."""
    go_on = threading.Event()

    def collate(batch):
        if batch[0] == 0 and num_workers > 1:
            assert go_on.wait(PATIENCE)
        return batch

    error = OSError("torn")
    iterator = iter(PyDataloader(Torn(6, error), 2, num_workers=num_workers, collate_fn=collate, in_order=False))
    found = [next(iterator) for _ in range(2 if num_workers > 1 else 3)]
    go_on.set()
    with pytest.raises(OSError) as caught:
        while True:
            found.append(next(iterator))
    assert caught.value is error
    assert "batch 3 of the stream" in error.__notes__[0]
    assert sorted(found) == [[0, 1], [2, 3], [4, 5]]
    assert list(iterator) == []


class TwoTorn(PyIterableDataset):
    """Three shards with two samples each; the first two fail after theirs, at the same time."""

    def __init__(self, errors):
        self.errors = errors
        self.failing = threading.Barrier(2)

    def shards(self, num_shards):
        return map(self.shard, range(num_shards))

    def shard(self, number):
        yield from (number, number)
        if number < 2:
            self.failing.wait(PATIENCE)
            raise self.errors[number]


def test_out_of_order_two_shards_that_fail_cost_no_batch_that_was_read():
    """The error that comes first in the order is raised after all batches that were read, and the other is not."""
    go_on = threading.Event()
    errors = [OSError("shard 0"), OSError("shard 1")]
    torn = TwoTorn(errors)

    def collate(batch):
        if batch[0] == 2:
            assert go_on.wait(PATIENCE)
        return batch

    loader = PyDataloader(torn, 2, num_workers=3, collate_fn=collate, in_order=False, adaptive=False, timeout=0.3)
    iterator = iter(loader)
    found = []
    with pytest.raises(BatchTimeoutError):  # the third batch is not ready, and the end is behind it
        while True:
            try:
                found.append(next(iterator))
            except BatchTimeoutError:
                if len(found) == 2 and torn.failing.n_waiting == 0:
                    raise
    go_on.set()
    with pytest.raises(OSError) as caught:
        while True:
            found.append(next(iterator))
    assert caught.value is errors[0]
    assert sorted(found) == [[0, 0], [1, 1], [2, 2]]
    assert list(iterator) == []


@with_workers
def test_workers_of_a_stream_start_before_its_first_batch(num_workers):
    """worker_init_fn has returned on all of them by then; what it raises comes out as it is."""
    started = []
    loader = PyDataloader(Stream(8), 2, num_workers=num_workers, worker_init_fn=started.append)
    assert next(iter(loader)) == [0, 1]
    assert sorted(started) == list(range(num_workers))
    error = ValueError("init")

    def fail(worker_id: int) -> None:
        if worker_id == 0:
            raise error

    iterator = iter(PyDataloader(Stream(8), 2, num_workers=num_workers, worker_init_fn=fail))
    with pytest.raises(ValueError) as caught:
        next(iterator)
    assert caught.value is error
    assert list(iterator) == []
    error.__traceback__ = None


def test_iterator_over_shards_does_not_know_its_length():
    """Each shard ends with a batch of its own."""

    class SizedShards(Sharded):
        def __len__(self):
            return self.length

    loader = PyDataloader(SizedShards(10), 2, num_workers=2)
    assert len(loader) == 5
    iterator = iter(loader)
    with pytest.raises(TypeError, match="not known"):
        len(iterator)
    assert len(list(iterator)) == 6
    assert len(iterator) == 0
