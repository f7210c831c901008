"""``__getitems__``: a whole batch fetched by one call."""

import itertools
import threading

import pytest
from toy_datasets import CountingDataset, Ids

from dataloader_rs import PyDataloader, PyDataset


class Batched(Ids):
    """Keeps the lists it was called with; fails if it is asked for a single item."""

    def __init__(self, length):
        super().__init__(length)
        self.calls = []
        self.threads = set()

    def __getitem__(self, index):
        raise AssertionError("asked for a single item")

    def __getitems__(self, indices):
        self.calls.append(indices)
        self.threads.add(threading.get_ident())
        return self.result(indices)

    def result(self, indices):
        return [index * 10 for index in indices]


class Returning(Batched):
    """Makes its answer with `result`."""

    def __init__(self, length, result):
        super().__init__(length)
        self.result = result


# ---- the call ----

def test_one_call_for_each_batch(num_workers):
    """B37: with the indices of the batch, in order; the samples come out in that order."""
    dataset = Batched(10)
    loader = PyDataloader(dataset, 4, num_workers=num_workers)
    assert list(loader) == [[0, 10, 20, 30], [40, 50, 60, 70], [80, 90]]
    assert sorted(dataset.calls) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert (threading.get_ident() in dataset.threads) == (num_workers == 0)


ORDERS = {
    "range": dict,
    "shuffle": lambda: {"shuffle": True, "seed": 1},
    "list": lambda: {"sampler": [5, 3, 3, 9, True, 2**70]},
    "iterator": lambda: {"sampler": iter([4, 2, 1])},
    "range with a step": lambda: {"sampler": range(8, 0, -2)},
}


@pytest.mark.parametrize("order", ORDERS)
def test_indices_are_a_list_of_plain_ints_whatever_their_source(order, num_workers):
    """B37: a ``list``, its elements ``int``, for every way an order can be made."""
    dataset = Batched(10)
    samples = sum(PyDataloader(dataset, 4, num_workers=num_workers, **ORDERS[order]()), [])
    assert samples
    for call in dataset.calls:
        assert type(call) is list
        assert {type(index) for index in call} == {int}
    assert sorted(sum(dataset.calls, [])) == sorted(sample // 10 for sample in samples)


def test_batch_of_one_still_gets_a_list(num_workers):
    """B37: batch_size=1 is no special case."""
    dataset = Batched(3)
    assert list(PyDataloader(dataset, 1, num_workers=num_workers)) == [[0], [10], [20]]
    assert sorted(dataset.calls) == [[0], [1], [2]]


@pytest.mark.parametrize("options", [{}, {"sampler": list(range(9))}, {"sampler": [2**70, *range(8)]},
                                     {"shuffle": True, "seed": 1}], ids=str)
def test_list_belongs_to_the_dataset(options, num_workers):
    """B37: it may change the list it got, or keep it: no epoch sees it, nor do the notes of errors."""
    class Spoiling(Batched):
        def result(self, indices):
            samples = list(indices)
            indices.clear()
            if len(samples) == 1:
                raise ValueError("bad batch")
            return samples

    dataset = Spoiling(9)
    plain = PyDataloader(Ids(9), 4, **options)
    loader = PyDataloader(dataset, 4, num_workers=num_workers, **options)
    for _ in range(2):
        *expected, failed = list(plain)
        iterator = iter(loader)
        assert [next(iterator), next(iterator)] == expected
        with pytest.raises(ValueError) as caught:
            next(iterator)
        assert f"[{failed[0]}]" in caught.value.__notes__[0]
    assert len({id(call) for call in dataset.calls}) == len(dataset.calls)


def test_epoch_without_items_makes_no_call(num_workers):
    """There is no empty batch to ask for."""
    dataset = Batched(0)
    assert list(PyDataloader(dataset, 4, num_workers=num_workers)) == []
    assert dataset.calls == []


def test_collate_fn_gets_the_list_of_samples(num_workers):
    """``collate_fn`` sees a list, whatever ``__getitems__`` returned."""
    seen = []

    def collate(samples):
        seen.append(type(samples))
        return sum(samples)

    dataset = Returning(5, tuple)
    assert list(PyDataloader(dataset, 2, num_workers=num_workers, collate_fn=collate)) == [1, 5, 4]
    assert set(seen) == {list}


# ---- the answer ----

@pytest.mark.parametrize("result", [list, tuple, iter, dict.fromkeys, lambda indices: (index for index in indices),
                                    lambda indices: map(int, indices),
                                    lambda indices: range(indices[0], indices[-1] + 1)])
def test_any_iterable_will_do_as_an_answer(result, num_workers):
    """B37: a tuple, a generator or an array; the batch is a list all the same."""
    assert list(PyDataloader(Returning(5, result), 2, num_workers=num_workers)) == [[0, 1], [2, 3], [4]]


def test_array_will_do_as_an_answer(num_workers):
    """B37: the samples of an array are its elements."""
    np = pytest.importorskip("numpy")
    [batch] = PyDataloader(Returning(3, lambda indices: np.array([indices, indices]).T), 3, num_workers=num_workers)
    assert type(batch) is list
    assert [row.tolist() for row in batch] == [[0, 0], [1, 1], [2, 2]]


def test_batch_is_not_the_datasets_own_list(num_workers):
    """A dataset may hand out the same list again and again: each batch is a list of its own."""
    shared = ["a", "b"]
    first, second = PyDataloader(Returning(4, lambda indices: shared), 2, num_workers=num_workers)
    first.clear()
    assert (first, second, shared) == ([], ["a", "b"], ["a", "b"])


@pytest.mark.parametrize(("result", "count"), [(lambda indices: indices[1:], 3), (lambda indices: [*indices, 0], 5),
                                               (lambda indices: (), 0), (lambda indices: iter(indices * 2), 8)])
def test_wrong_number_of_samples_is_a_value_error_with_both_counts(result, count, num_workers):
    """B37: neither too few nor too many are taken in silence, and the next batch goes on."""
    dataset = Returning(8, lambda indices: result(indices) if indices[0] == 0 else indices)
    iterator = iter(PyDataloader(dataset, 4, num_workers=num_workers))
    with pytest.raises(ValueError) as caught:
        next(iterator)
    assert str(caught.value).startswith("__getitems__ must return one sample for each index")
    assert f"got {count} samples for 4 indices" in str(caught.value)
    assert "indices [0, 1, 2, 3]" in caught.value.__notes__[0]
    assert next(iterator) == [4, 5, 6, 7]


def test_wrong_number_of_samples_in_a_short_last_batch_is_found(num_workers):
    """B37: the count that is right is that of the batch, not batch_size."""
    dataset = Returning(6, lambda indices: range(4))
    iterator = iter(PyDataloader(dataset, 4, num_workers=num_workers))
    assert next(iterator) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="got 4 samples for 2 indices"):
        next(iterator)


@pytest.mark.parametrize("result", [lambda indices: None, len, lambda indices: object()])
def test_answer_that_is_not_iterable_is_a_type_error(result, num_workers):
    """A forgotten ``return`` is an error of its batch."""
    with pytest.raises(TypeError, match="iterable") as caught:
        next(iter(PyDataloader(Returning(8, result), 2, num_workers=num_workers)))
    assert "indices [0, 1]" in caught.value.__notes__[0]


# ---- errors ----

@pytest.mark.parametrize("lazy", [False, True])
def test_error_has_a_note_with_the_indices_of_the_batch(lazy, num_workers):
    """B07: it is not known which item failed, so all are named; also when the answer is a generator that raises."""
    error = OSError("bad file")

    def fail(indices):
        if 37 in indices:
            raise error
        return indices

    def fail_late(indices):
        for index in indices:
            if index == 37:
                raise error
            yield index

    iterator = iter(PyDataloader(Returning(50, fail_late if lazy else fail), 5, sampler=[1, 2, 30, 4, 5, 6, 37, 8],
                                 num_workers=num_workers))
    assert next(iterator) == [1, 2, 30, 4, 5]
    with pytest.raises(OSError) as caught:
        next(iterator)
    assert caught.value is error
    assert len(error.__notes__) == 1
    assert "indices [6, 37, 8] (batch 1)" in error.__notes__[0]
    assert ("worker" in error.__notes__[0]) == (num_workers > 0)


def test_stop_iteration_is_a_runtime_error(num_workers):
    """Decision 15: it would end the epoch in silence."""
    error = StopIteration()

    def fail(indices):
        raise error

    with pytest.raises(RuntimeError) as caught:
        list(PyDataloader(Returning(2, fail), 2, num_workers=num_workers))
    assert caught.value.__cause__ is error


# ---- when it is used ----

def test_none_turns_it_off(num_workers):
    """B37: ``__getitems__ = None`` in a subclass goes back to single items."""
    class Single(Batched):
        __getitems__ = None

        def __getitem__(self, index):
            return index

    assert list(PyDataloader(Single(5), 2, num_workers=num_workers)) == [[0, 1], [2, 3], [4]]


def test_items_in_parallel_does_not_use_it(num_workers):
    """Items that are fetched side by side are fetched one by one."""
    class Both(CountingDataset):
        def __getitems__(self, indices):
            raise AssertionError("asked for a whole batch")

    dataset = Both(7)
    loader = PyDataloader(dataset, 3, num_workers=num_workers, items_in_parallel=3)
    assert list(loader) == [[0, 1, 2], [3, 4, 5], [6]]
    assert sorted(dataset.started) == list(range(7))


def test_dataset_that_answers_every_attribute_has_none(num_workers):
    """B37: a ``__getattr__`` that answers everything is not mistaken for it."""
    class Answers(Ids):
        def __getattr__(self, name):
            raise AssertionError(f"asked for {name}") if name == "__getitems__" else AttributeError(name)

    assert list(PyDataloader(Answers(3), 2, num_workers=num_workers)) == [[0, 1], [2]]


def test_attribute_of_the_instance_does_not_count(num_workers):
    """B37: it is looked up on the type, as Python does with its own special methods."""
    def wrong(indices):
        raise AssertionError("the attribute of an instance was called")

    plain, batched = Ids(3), Batched(3)
    plain.__getitems__ = batched.__getitems__ = wrong
    assert list(PyDataloader(plain, 2, num_workers=num_workers)) == [[0, 1], [2]]
    assert list(PyDataloader(batched, 2, num_workers=num_workers)) == [[0, 10], [20]]


def test_it_is_looked_up_once_for_each_loader(num_workers):
    """B37: not once a batch."""
    class Descriptor:
        lookups = 0

        def __get__(self, instance, owner):
            if instance is not None:
                Descriptor.lookups += 1
            return list

    class Watched(Ids):
        __getitems__ = Descriptor()

    loader = PyDataloader(Watched(8), 2, num_workers=num_workers)
    for _ in range(2):
        assert list(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert Descriptor.lookups == 1


def test_static_and_class_methods_work(num_workers):
    """Whatever kind of method it is, it is bound as Python binds it."""
    class Static(Ids):
        @staticmethod
        def __getitems__(indices):
            return ["static"] * len(indices)

    class OfClass(Ids):
        @classmethod
        def __getitems__(cls, indices):
            return [cls] * len(indices)

    assert list(PyDataloader(Static(2), 2, num_workers=num_workers)) == [["static", "static"]]
    assert list(PyDataloader(OfClass(2), 2, num_workers=num_workers)) == [[OfClass, OfClass]]


def test_wrapped_object_keeps_its_own(num_workers):
    """``PyDataset.of(obj)`` uses the ``__getitems__`` of `obj` if its class has one, and has none if not."""
    class Foreign:
        calls = []

        def __len__(self):
            return 3

        def __getitem__(self, index):
            return index

    class ForeignBatched(Foreign):
        def __getitems__(self, indices):
            self.calls.append(indices)
            return [str(index) for index in indices]

    class TurnedOff(ForeignBatched):
        __getitems__ = None

    for kind, expected in ((Foreign, [[0, 1], [2]]), (ForeignBatched, [["0", "1"], ["2"]]), (TurnedOff, [[0, 1], [2]])):
        dataset = PyDataset.of(kind())
        assert hasattr(dataset, "__getitems__") == (kind is ForeignBatched)
        assert list(PyDataloader(dataset, 2, num_workers=num_workers)) == expected
    assert sorted(Foreign.calls) == [[0, 1], [2]]


def test_answer_without_an_end_is_a_wrong_count(num_workers):
    """It is refused like any other that is too long, not read for ever."""
    loader = PyDataloader(Returning(2, lambda indices: itertools.repeat(0)), 2, num_workers=num_workers)
    with pytest.raises(ValueError, match="at least 1004 samples for 2 indices"):
        list(loader)
