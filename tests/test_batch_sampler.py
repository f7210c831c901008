"""batch_sampler: batches of any indices and sizes, drawn as they are needed; and batch_size=None: no batches at all."""

from __future__ import annotations

import itertools
import operator
import threading
import warnings

import numpy as np
import pytest
from toy_datasets import CountingDataset, FailingDataset, GatedDataset, Ids

from dataloader_rs import PyDataloader

SIZES = [(0, 1), (0, 3), (1, 1), (4, 1), (2, 3)]
every_size = pytest.mark.parametrize(("num_workers", "items_in_parallel"), SIZES)


def load(dataset, num_workers: int, items_in_parallel: int, **arguments) -> PyDataloader:
    return PyDataloader(dataset, num_workers=num_workers, items_in_parallel=items_in_parallel, **arguments)


# ---- batch_sampler ----


@every_size
def test_batches_are_those_of_the_batch_sampler(num_workers, items_in_parallel):
    """Any iterable of iterables of indices, of any sizes, also none, gives its batches in its order."""
    batches = [[3, 1], (2,), np.array([5, 5, 0]), (index for index in (9, 8)), range(4), [], iter([7])]
    loader = load(Ids(10), num_workers, items_in_parallel, batch_sampler=batches)
    assert list(loader) == [[3, 1], [2], [5, 5, 0], [9, 8], [0, 1, 2, 3], [], [7]]


@every_size
def test_many_batches_of_many_sizes(num_workers, items_in_parallel):
    """Each batch has its own size, over more batches than are ever fetched ahead."""
    batches = [list(range(number % 7)) for number in range(3000)]
    loader = load(Ids(10), num_workers, items_in_parallel, batch_sampler=batches)
    for _ in range(2):
        assert list(loader) == batches


@every_size
def test_collate_fn_gets_each_batch(num_workers, items_in_parallel):
    """collate_fn gets the list of samples once, an empty one too; without workers on the calling thread."""
    threads = set()

    def collate(samples):
        threads.add(threading.current_thread())
        return "collated", samples

    loader = load(Ids(10), num_workers, items_in_parallel, batch_sampler=[[1, 2], [], [3]], collate_fn=collate)
    assert list(loader) == [("collated", [1, 2]), ("collated", []), ("collated", [3])]
    assert (threads == {threading.current_thread()}) == (num_workers == 0)


@pytest.mark.parametrize("num_workers", [0, 1, 4])
def test_getitems_gets_each_batch(num_workers):
    """__getitems__ is called once for each batch, with its indices."""

    class Rows(Ids):
        def __getitems__(self, indices):
            return [-index for index in indices]

    assert list(PyDataloader(Rows(9), batch_sampler=[[1, 2], [3], []], num_workers=num_workers)) == [[-1, -2], [-3], []]


@every_size
def test_lengths_are_those_of_the_batch_sampler(num_workers, items_in_parallel):
    """len(loader) is len(batch_sampler); that of the iterator is known once the end has been seen."""
    loader = load(Ids(10), num_workers, items_in_parallel, batch_sampler=[[1], [2], [3]])
    assert len(loader) == 3
    assert loader.batch_size is None
    iterator = iter(loader)
    assert [next(iterator), next(iterator), next(iterator)] == [[1], [2], [3]]
    with pytest.raises(StopIteration):
        next(iterator)
    assert len(iterator) == 0
    with pytest.raises(TypeError):
        len(load(Ids(10), num_workers, items_in_parallel, batch_sampler=iter([[1]])))


def test_without_workers_a_batch_is_drawn_when_it_is_asked_for():
    """The sampler may look at the state of the training when it makes a batch."""
    state = [0]
    iterator = iter(PyDataloader(Ids(100), batch_sampler=([state[0]] for _ in range(5))))
    for step in range(5):
        state[0] = 10 * step
        assert next(iterator) == [10 * step]


@pytest.mark.parametrize(("num_workers", "items_in_parallel"), SIZES[2:])
def test_no_more_batches_are_drawn_than_may_be_fetched_ahead(num_workers, items_in_parallel):
    """At most num_workers + prefetch_depth batches beyond those that were delivered are drawn."""
    drawn = itertools.count()
    last = [-1]

    def batches():
        while True:
            last[0] = next(drawn)
            yield [last[0] % 10]

    iterator = iter(load(Ids(10), num_workers, items_in_parallel, batch_sampler=batches(), prefetch_depth=3))
    for delivered in range(20):
        assert next(iterator) == [delivered % 10]
        assert last[0] - delivered <= num_workers + 3


@every_size
def test_batch_is_copied_when_it_is_drawn(num_workers, items_in_parallel):
    """A sampler that fills the same list again does not change batches that were drawn before."""

    def batches():
        buffer = [0, 0]
        for number in range(50):
            buffer[:] = [number, number + 1]
            yield buffer

    loaded = list(load(Ids(100), num_workers, items_in_parallel, batch_sampler=batches()))
    assert loaded == [[number, number + 1] for number in range(50)]


@every_size
@pytest.mark.parametrize(("wrong", "error", "message"), [
    (3, TypeError, "batch_sampler must yield iterables of indices, got 3 (int) as batch 2"),
    ([0, "x"], TypeError, "batch_sampler must yield integers, got 'x' (str) at position 1 of batch 2"),
    ([0, -1], ValueError, "batch_sampler must yield indices >= 0, got -1 at position 1 of batch 2"),
])
def test_wrong_batch_is_an_error_in_its_place(num_workers, items_in_parallel, wrong, error, message):
    """What was drawn before comes first; then the error says what was wrong and where; then the epoch is over."""
    iterator = iter(load(Ids(10), num_workers, items_in_parallel, batch_sampler=[[0], [1], wrong, [3]]))
    assert [next(iterator), next(iterator)] == [[0], [1]]
    with pytest.raises(error) as caught:
        next(iterator)
    assert str(caught.value) == message
    assert list(iterator) == []


@every_size
def test_error_of_the_sampler_or_of_a_batch_comes_in_its_place(num_workers, items_in_parallel):
    """The object that was raised, after the batches before it; a StopIteration in a batch is not the end."""

    def sampler(error):
        yield [0]
        yield [1]
        raise error

    def batch(error):
        yield 2
        raise error

    error = OSError("gone")
    iterator = iter(load(Ids(10), num_workers, items_in_parallel, batch_sampler=sampler(error)))
    assert [next(iterator), next(iterator)] == [[0], [1]]
    with pytest.raises(OSError) as caught:
        next(iterator)
    assert caught.value is error
    assert list(iterator) == []
    iterator = iter(load(Ids(10), num_workers, items_in_parallel, batch_sampler=[[0], batch(error)]))
    assert next(iterator) == [0]
    with pytest.raises(OSError) as caught:
        next(iterator)
    assert caught.value is error

    class Stops:
        def __iter__(self):
            raise StopIteration("not the end")

    iterator = iter(load(Ids(10), num_workers, items_in_parallel, batch_sampler=[[0], Stops()]))
    assert next(iterator) == [0]
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        next(iterator)


@every_size
def test_damaged_sample_costs_its_batch_and_the_note_names_it(num_workers, items_in_parallel):
    """The next batch comes as if nothing had been; the note has the index and the number of the batch."""
    loader = load(FailingDataset(10, {5: OSError("bad")}), num_workers, items_in_parallel,
                  batch_sampler=[[1, 2, 3], [4, 5], [6]])
    iterator = iter(loader)
    assert next(iterator) == [1, 2, 3]
    with pytest.raises(OSError) as caught:
        next(iterator)
    assert "index 5 (position 1 of batch 1)" in caught.value.__notes__[0]
    assert list(iterator) == [[6]]


@pytest.mark.parametrize(("name", "value"), [
    ("batch_size", 2), ("shuffle", True), ("sampler", [1]), ("drop_last", True)])
def test_what_it_replaces_cannot_be_given_beside_it(name, value):
    """A ValueError names the two."""
    with pytest.raises(ValueError, match=f"batch_sampler and {name} are mutually exclusive"):
        PyDataloader(Ids(4), batch_sampler=[[1]], **{name: value})


@pytest.mark.parametrize("batch_size", [1, None])
def test_default_batch_size_may_be_given_beside_it(batch_size):
    """The default and None say nothing."""
    assert list(PyDataloader(Ids(4), batch_size, batch_sampler=[[1, 2]])) == [[1, 2]]


def test_batch_sampler_that_is_no_iterable_is_a_type_error():
    """The message has the argument, the rule and the value."""
    with pytest.raises(TypeError, match="batch_sampler must be an iterable of iterables of indices or None, got 5"):
        PyDataloader(Ids(4), batch_sampler=5)


@every_size
def test_iterator_that_is_used_up_is_warned_about(num_workers, items_in_parallel):
    """As for a sampler, an epoch that an earlier one left nothing for is most likely a mistake."""
    loader = load(Ids(4), num_workers, items_in_parallel, batch_sampler=iter([[1], [2]]))
    assert list(loader) == [[1], [2]]
    with pytest.warns(RuntimeWarning, match="yields nothing"):
        assert list(loader) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(load(Ids(4), num_workers, items_in_parallel, batch_sampler=[])) == []


def test_endless_batch_sampler_with_a_huge_prefetch_depth_starts_at_once():
    """What is drawn at iter() has a bound of its own."""
    loader = PyDataloader(Ids(4), prefetch_depth=10**12, num_workers=1, batch_sampler=itertools.repeat([1]))
    assert list(itertools.islice(loader, 3000)) == [[1]] * 3000


# ---- no batches ----


@every_size
def test_without_a_batch_size_samples_come_one_by_one(num_workers, items_in_parallel):
    """B35: samples, not lists of one."""
    loader = load(Ids(5), num_workers, items_in_parallel, batch_size=None)
    assert list(loader) == [0, 1, 2, 3, 4]
    assert len(loader) == 5
    assert len(iter(loader)) == 5
    assert loader.batch_size is None


@every_size
def test_without_a_batch_size_shuffle_and_sampler_work(num_workers, items_in_parallel):
    """B35: a permutation, the same for any number of workers; or the order of the sampler."""
    shuffled = list(load(Ids(50), num_workers, items_in_parallel, batch_size=None, shuffle=True, seed=3))
    assert sorted(shuffled) == list(range(50)) != shuffled
    assert shuffled == list(PyDataloader(Ids(50), None, shuffle=True, seed=3))
    assert list(load(Ids(50), num_workers, items_in_parallel, batch_size=None, sampler=iter([4, 2]))) == [4, 2]


@every_size
def test_without_a_batch_size_collate_fn_gets_the_sample(num_workers, items_in_parallel):
    """B35: and its errors have the index."""
    loader = load(Ids(5), num_workers, items_in_parallel, batch_size=None, collate_fn=operator.neg)
    assert list(loader) == [0, -1, -2, -3, -4]
    iterator = iter(load(Ids(2), num_workers, items_in_parallel, batch_size=None, collate_fn=len))
    with pytest.raises(TypeError) as caught:
        next(iterator)
    assert "[0] (batch 0)" in caught.value.__notes__[0]


@pytest.mark.parametrize("num_workers", [0, 1, 4])
def test_without_a_batch_size_single_items_are_asked_for(num_workers):
    """__getitems__ is for batches."""

    class Rows(CountingDataset):
        def __getitems__(self, indices):
            raise AssertionError("this is no batch")

    assert list(PyDataloader(Rows(3), None, num_workers=num_workers)) == [0, 1, 2]


@every_size
def test_without_a_batch_size_damaged_sample_costs_itself(num_workers, items_in_parallel):
    """The samples after it come."""
    iterator = iter(load(FailingDataset(4, {1: OSError("bad")}), num_workers, items_in_parallel, batch_size=None))
    assert next(iterator) == 0
    with pytest.raises(OSError):
        next(iterator)
    assert list(iterator) == [2, 3]


def test_drop_last_needs_batches():
    """B35: the ValueError names both arguments."""
    with pytest.raises(ValueError, match="drop_last needs batches, got drop_last=True with batch_size=None"):
        PyDataloader(Ids(5), None, drop_last=True)


# ---- any order ----


@pytest.mark.parametrize(("num_workers", "items_in_parallel"), [(2, 1), (4, 1), (2, 3)])
def test_out_of_order_a_slow_batch_holds_up_no_other(num_workers, items_in_parallel):
    """in_order=False: batches come as they get ready, each once."""
    dataset = GatedDataset(40, closed={0})
    iterator = iter(load(dataset, num_workers, items_in_parallel, batch_size=4, in_order=False))
    batches = [next(iterator) for _ in range(9)]
    assert sorted(batches) == [list(range(first, first + 4)) for first in range(4, 40, 4)]
    assert len(iterator) == 1
    dataset.open()
    assert list(iterator) == [[0, 1, 2, 3]]


@every_size
def test_out_of_order_every_batch_and_every_error_comes_once(num_workers, items_in_parallel):
    """Also with batches of many sizes; notes name the index that failed."""
    batches = [[number] * (number % 4) for number in range(300)]
    errors = {number: OSError(str(number)) for number in range(1, 300, 50)}
    loader = load(FailingDataset(300, errors), num_workers, items_in_parallel, batch_sampler=batches, in_order=False)
    iterator, found, raised = iter(loader), [], []
    while True:
        try:
            found.append(next(iterator))
        except StopIteration:
            break
        except OSError as error:
            raised.append(int(str(error)))
            assert f"index {error} (position 0 of batch {error})" in error.__notes__[0]
    expected = [batch for batch in batches if not batch or batch[0] not in errors]
    assert sorted(found) == sorted(expected)
    assert sorted(raised) == [number for number in errors if number % 4]


def test_out_of_order_no_more_is_fetched_ahead():
    """The bound of prefetching is the same: what is stuck counts."""
    dataset = GatedDataset(100, closed={0})
    iterator = iter(PyDataloader(dataset, prefetch_depth=2, num_workers=2, in_order=False))
    dataset.wait_until_started(range(4))
    assert sorted(next(iterator) for _ in range(3)) == [[1], [2], [3]]
    dataset.wait_until_started(range(7))
    assert max(dataset.started) <= 3 + 2 + 2
    dataset.open()
    assert len(list(iterator)) == 97


class Interrupts:
    """An index during which Ctrl-C is pressed."""

    def __index__(self) -> int:
        raise KeyboardInterrupt


def test_interrupted_batch_is_no_clean_end():
    """What was drawn by then is lost, so the epoch must not seem to end well."""
    iterator = iter(PyDataloader(Ids(9), batch_sampler=[[0], [1, Interrupts()], [2]]))
    assert next(iterator) == [0]
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    with pytest.raises(RuntimeError, match="the rest of the epoch is lost"):
        next(iterator)
    assert list(iterator) == []
    with pytest.raises(KeyboardInterrupt):
        iter(PyDataloader(Ids(9), batch_sampler=[[0], [1, Interrupts()], [2]], num_workers=2))


def next_in_time(iterator):
    """The next batch, however often the wait for it takes longer than the loader's `timeout`."""
    while True:
        try:
            return next(iterator)
        except TimeoutError:
            pass


def test_who_waits_again_after_a_timeout_draws_no_further():
    """A batch is drawn for each that is delivered, not for each call."""
    drawn = itertools.count()
    dataset = GatedDataset(1, closed={0})
    iterator = iter(PyDataloader(dataset, num_workers=1, prefetch_depth=1, timeout=0.01,
                                 batch_sampler=([0] for _ in drawn)))
    for _ in range(20):
        with pytest.raises(TimeoutError):
            next(iterator)
    assert next(drawn) <= 3
    dataset.open()
    assert next_in_time(iterator) == [0]
