"""Samplers: how far they are read and when, what becomes of their values, and how their errors come out."""

import itertools
import threading
import warnings

import numpy as np
import pytest
from conftest import without_address
from reference import drained
from toy_datasets import Ids

from dataloader_rs import PyDataloader, PyDataset

READ_AHEAD = 65_536
# No index at all, one, most of a batch, whole batches, and one on either side of what iter() reads.
LENGTHS = [0, 9, 10, 65_530, 65_535, 65_536, 65_537, 70_000]


class Unsized:
    """Yields the numbers below `length` (None: without end), and knows how many were drawn and on which threads."""

    def __init__(self, length, error=None):
        self.length = length
        self.error = error
        self.drawn = 0
        self.threads = set()

    def __iter__(self):
        for index in itertools.count() if self.length is None else range(self.length):
            self.threads.add(threading.get_ident())
            self.drawn += 1
            yield index
        if self.error is not None:
            self.threads.add(threading.get_ident())
            raise self.error


class Sized(Unsized):
    def __len__(self):
        return self.length


class Anything(PyDataset):
    """Longer than any sampler asks for; ``dataset[i]`` is i itself, so that what arrives can be seen."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return index


class Index:
    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


class Values:
    """An iterable without a length over `values`, from the start each time."""

    def __init__(self, *values):
        self.values = values

    def __iter__(self):
        return iter(self.values)


def cut(length, size, drop_last=False):
    """The batches of ``range(length)``."""
    end = length - length % size if drop_last else length
    return [list(range(start, min(start + size, length))) for start in range(0, end, size)]


def after_read_ahead(*values):
    """An iterable without a length whose first 65,536 indices are 0, so that `values` are drawn on demand."""
    return Values(*itertools.repeat(0, READ_AHEAD), *values)


# ---- how far, and when ----

@pytest.mark.parametrize("length", [0, 1, 100_000])
def test_sized_sampler_is_read_whole_at_iter(length, num_workers):
    """Decision 13: one with a length is read to its end when the epoch starts, and once."""
    sampler = Sized(length)
    loader = PyDataloader(Ids(length), 1000, sampler=sampler, num_workers=num_workers)
    assert sampler.drawn == 0
    iterator = iter(loader)
    assert sampler.drawn == length
    assert len(iterator) == len(loader) == -(-length // 1000)
    assert list(iterator) == cut(length, 1000)
    assert sampler.drawn == length


def test_sized_sampler_may_yield_more_or_less_than_its_length(num_workers):
    """The length decides how it is read, the indices decide the epoch."""
    for length, indices in ((2, [0, 1, 2, 3, 4]), (9, [0, 1])):
        class Wrong(Values):
            def __len__(self):
                return length  # noqa: B023

        assert list(PyDataloader(Ids(9), 2, sampler=Wrong(*indices), num_workers=num_workers)) == cut(len(indices), 2)


@pytest.mark.parametrize("size", [1, 10, 65_536, 70_000])
@pytest.mark.parametrize("workers", [0, 2])
def test_endless_sampler_is_read_ahead_and_then_a_batch_for_each_next(size, workers):
    """Decisions 12 and 13: 65,536 indices at iter(), then exactly one batch's worth for each next()."""
    sampler = Unsized(None)
    iterator = iter(PyDataloader(Anything(), size, sampler=sampler, num_workers=workers))
    assert sampler.drawn == READ_AHEAD
    for number in range(3):
        assert next(iterator) == list(range(number * size, (number + 1) * size))
        assert sampler.drawn == READ_AHEAD + (number + 1) * size
        with pytest.raises(TypeError, match="not known"):
            len(iterator)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 10, 65_536, 70_000])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_no_index_is_lost_where_reading_ahead_ends(size, drop_last, workers):
    """Decision 13: around the 65,536th index batches are those of a sized sampler, for every length near it."""
    for length in LENGTHS if size > 10 or (size == 10 and workers == 0) else [65_537]:
        sampler = Unsized(length)
        loader = PyDataloader(Ids(length), size, sampler=sampler, drop_last=drop_last, num_workers=workers)
        assert list(loader) == cut(length, size, drop_last)
        assert sampler.drawn == length


@pytest.mark.parametrize("length", [0, 1, 1003, 65_535])
@pytest.mark.parametrize("drop_last", [False, True])
def test_finite_sampler_without_a_length_is_like_a_sized_one(length, drop_last, num_workers):
    """Decision 13: up to 65,535 indices its end is seen at iter(), so that ``len(it)`` is right from the start."""
    loader = PyDataloader(Ids(length), 100, sampler=Unsized(length), drop_last=drop_last, num_workers=num_workers)
    batches = cut(length, 100, drop_last)
    iterator = iter(loader)
    for left in range(len(batches), 0, -1):
        assert len(iterator) == left
        next(iterator)
    assert len(iterator) == 0


def test_length_of_the_iterator_is_known_once_the_end_is_seen(num_workers):
    """B33: beyond what iter() read, ``len(it)`` raises TypeError until the last index was drawn, then it is right."""
    loader = PyDataloader(Ids(100_000), 10_000, sampler=Unsized(88_000), num_workers=num_workers)
    iterator = iter(loader)
    # 65,536 are drawn: each next() draws 10,000 more, and the third meets the end.
    for _ in range(2):
        with pytest.raises(TypeError):
            len(iterator)
        next(iterator)
    for left in (6, 5, 4, 3, 2, 1, 0):
        next(iterator)
        assert len(iterator) == left
    with pytest.raises(StopIteration):
        next(iterator)


def test_endless_one_shot_sampler_goes_on_where_an_epoch_left_it():
    """An iterator is drawn from where it stands; what an epoch read ahead is gone with the epoch."""
    loader = PyDataloader(Anything(), 3, sampler=itertools.count())
    assert next(iter(loader)) == [0, 1, 2]
    assert next(iter(loader)) == [READ_AHEAD + 3, READ_AHEAD + 4, READ_AHEAD + 5]


def test_sampler_is_iterated_anew_each_epoch(num_workers):
    """A sampler that gives another order each time gives each epoch another order."""
    class Rotating:
        def __init__(self):
            self.turns = 0

        def __iter__(self):
            self.turns += 1
            return iter([self.turns, self.turns + 1])

    loader = PyDataloader(Ids(9), 2, sampler=Rotating(), num_workers=num_workers)
    assert [list(loader) for _ in range(3)] == [[[1, 2]], [[2, 3]], [[3, 4]]]


def test_sampler_runs_on_the_thread_of_the_consumer(num_workers):
    """Decision 12: in iter() and in next(), and on no worker."""
    sampler = Unsized(70_000)
    loader = PyDataloader(Ids(70_000), 1000, sampler=sampler, num_workers=num_workers, items_in_parallel=2)
    assert sum(map(len, loader)) == 70_000
    assert sampler.threads == {threading.get_ident()}


@pytest.mark.parametrize("sampler", [range(4, 0, -1), (2, 0, 1), [1, 1, 1], {3: "a", 1: "b"}, {2}, b"\x01\x00",
                                     np.array([2, 0]), np.array([1, 3], np.uint8), [], "",
                                     np.array([], float)], ids=repr)
def test_any_iterable_of_indices_is_a_sampler(sampler, num_workers):
    """Whatever can be iterated will do, with repeats or without; an empty one makes an empty epoch."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert sum(PyDataloader(Ids(5), 2, sampler=sampler, num_workers=num_workers), []) == list(sampler)


def test_object_with_getitem_alone_is_a_sampler(num_workers):
    """The old sequence protocol makes an iterable too."""
    class Old:
        def __getitem__(self, position):
            return [2, 0, 1][position]

    assert list(PyDataloader(Ids(3), 2, sampler=Old(), num_workers=num_workers)) == [[2, 0], [1]]


# ---- lengths ----

@pytest.mark.parametrize(("num_indices", "size", "drop_last", "expected"), [
    (30, 8, False, 4), (30, 8, True, 3), (250, 8, False, 32), (250, 8, True, 31), (0, 8, False, 0)])
def test_lengths_with_a_sampler_are_those_of_the_sampler(num_indices, size, drop_last, expected, num_workers):
    """B33: shorter or longer than the dataset, ``len(it)`` is the number of batches still to come at each step."""
    sampler = [i % 100 for i in range(num_indices)]
    loader = PyDataloader(Ids(100), size, sampler=sampler, drop_last=drop_last, num_workers=num_workers)
    assert len(loader) == expected
    iterator = iter(loader)
    seen = [len(iterator)]
    for _ in iterator:
        seen.append(len(iterator))
    assert seen == list(range(expected, -1, -1))


def test_sampler_without_a_length_can_be_iterated_but_not_counted(num_workers):
    """B33: ``len(loader)`` is a TypeError, ``list(loader)``, which asks for a length hint, works."""
    loader = PyDataloader(Ids(100), 8, sampler=Unsized(30), num_workers=num_workers)
    with pytest.raises(TypeError):
        len(loader)
    assert list(loader) == cut(30, 8)
    assert len(iter(loader)) == 4


def test_sampler_whose_length_is_not_implemented_is_read_as_one_without(num_workers):
    """Some samplers have a ``__len__`` only to say that they do not know."""
    class Unknown(Unsized):
        def __len__(self):
            raise NotImplementedError

    assert [*iter(PyDataloader(Ids(100), 8, sampler=Unknown(30), num_workers=num_workers))] == cut(30, 8)


# ---- what arrives ----

@pytest.mark.parametrize("wrap", [lambda values: values, lambda values: Values(*values),
                                  lambda values: after_read_ahead(*values)], ids=["sized", "unsized", "drawn"])
@pytest.mark.parametrize("parallel", [1, 3])
def test_indices_arrive_as_plain_ints(wrap, parallel, num_workers):
    """Decision 14: NumPy integers, bools and objects with ``__index__`` become int; its type is int and no other."""
    class Special(int):
        pass

    given = [np.int64(3), np.uint8(200), np.int16(0), True, False, Index(7), Special(5), 2**31, np.uint64(2**63 - 1)]
    loader = PyDataloader(Anything(), 4096, sampler=wrap(given), num_workers=num_workers, items_in_parallel=parallel)
    arrived = sum(loader, [])[-len(given):]
    assert arrived == [3, 200, 0, 1, 0, 7, 5, 2**31, 2**63 - 1]
    assert {type(index) for index in arrived} == {int}


@pytest.mark.parametrize("wrap", [lambda values: values, lambda values: Values(*values),
                                  lambda values: after_read_ahead(*values)], ids=["sized", "unsized", "drawn"])
def test_index_of_any_size_arrives_unchanged(wrap, num_workers):
    """Decision 14: a dataset may count beyond 64 bits; nothing is cut, and smaller neighbours are as they were."""
    given = [1, 2**63 - 1, 2**63, 2**64 - 1, np.uint64(2**64 - 1), 2**64, 10**30, Index(10**40), True, 0, 10**5000]
    arrived = sum(PyDataloader(Anything(), 4096, sampler=wrap(given), num_workers=num_workers), [])[-len(given):]
    assert arrived == [index.__index__() for index in given]
    assert {type(index) for index in arrived} == {int}


def test_index_beyond_the_dataset_is_the_datasets_own_affair(num_workers):
    """The length of the dataset is not asked when a sampler gives the indices."""
    class Lengthless(Anything):
        def __len__(self):
            raise AssertionError("asked for its length")

    loader = PyDataloader(Lengthless(), 2, sampler=[10, 99, 5], num_workers=num_workers)
    assert len(loader) == 2
    assert list(loader) == [[10, 99], [5]]


# ---- wrong values ----

WRONG = [("x", TypeError, "'x' (str)"), (1.0, TypeError, "1.0 (float)"), (None, TypeError, "None (NoneType)"),
         ((0, 1), TypeError, "(0, 1) (tuple)"), (np.float64(1), TypeError, "float64"), (-1, ValueError, "-1"),
         (np.int8(-3), ValueError, "-3"), (-(2**70), ValueError, "-1180591620717411303424"),
         (Index(-2), ValueError, "-2"), (float("nan"), TypeError, "nan (float)"), (np.True_, TypeError, "True_"),
         ([1], TypeError, "[1] (list)")]


@pytest.mark.parametrize(("value", "error", "shown"), WRONG, ids=[without_address(wrong[0]) for wrong in WRONG])
@pytest.mark.parametrize("position", [0, 2])
@pytest.mark.parametrize("sized", [True, False])
def test_wrong_index_is_an_error_at_iter(value, error, shown, position, sized):
    """B31, decision 14: what is read at iter() is checked there; the message has the value and its position."""
    indices = [0] * position + [value, 0, 1]
    loader = PyDataloader(Ids(3), sampler=indices if sized else Values(*indices))
    with pytest.raises(error) as caught:
        iter(loader)
    rule = "sampler must yield integers, got " if error is TypeError else "sampler must yield indices >= 0, got "
    assert str(caught.value).startswith(rule)
    assert shown in str(caught.value)
    assert str(caught.value).endswith(f"at position {position}")


def test_wrong_index_after_an_enormous_one_is_found(num_workers):
    """Indices beyond 64 bits take another way, with the same checks."""
    for value, error in ((-1, ValueError), ("x", TypeError)):
        loader = PyDataloader(Ids(3), sampler=[0, 2**64, value], num_workers=num_workers)
        with pytest.raises(error, match="at position 2"):
            iter(loader)


def test_wrong_index_whose_repr_raises_is_named_by_its_type():
    """The message does not depend on the value's ``__repr__``."""
    class Unprintable:
        def __repr__(self):
            raise RuntimeError("no repr")

    with pytest.raises(TypeError, match="Unprintable.* at position 1"):
        iter(PyDataloader(Ids(3), sampler=[0, Unprintable()]))


def test_wrong_index_in_a_late_chunk_of_a_sized_sampler_is_named_with_its_position():
    """Long samplers are read in pieces; positions are those of the epoch."""
    indices = [0] * 150_000
    indices[140_000] = -5
    with pytest.raises(ValueError, match="got -5 at position 140000"):
        iter(PyDataloader(Ids(3), sampler=indices))


# ---- errors, in the order of the batches ----

@pytest.mark.parametrize(("length", "size"), [
    *itertools.product([65_536, 65_537], [1, 65_536]), *itertools.product([65_536, 65_545, 75_001], [10, 1000]),
    *itertools.product([65_536, 75_001, 141_000], [65_536, 70_000])])
def test_error_of_a_sampler_comes_from_the_next_that_needs_the_index(length, size):
    """B31, decision 13: every batch whose indices were drawn comes first, then the error itself, then the end.

    Fails on a loader that drops the indices which were drawn together with the error.
    """
    error = ValueError("boom")
    iterator = iter(PyDataloader(Ids(length), size, sampler=Unsized(length, error), num_workers=1 if size == 10 else 0))
    outcomes = drained(iterator)
    assert outcomes[:-1] == cut(length, size, drop_last=True)
    assert outcomes[-1] is error
    assert len(iterator) == 0
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)


@pytest.mark.parametrize("drop_last", [False, True])
def test_error_of_a_sampler_comes_after_all_earlier_batches(drop_last, num_workers):
    """B31: also with workers, which have more batches under way than were delivered, and with drop_last."""
    error = ValueError("boom")
    loader = PyDataloader(Ids(70_000), 1000, sampler=Unsized(67_500, error), num_workers=num_workers,
                          prefetch_depth=3, drop_last=drop_last)
    outcomes = drained(iter(loader))
    assert outcomes[:-1] == cut(67_000, 1000)
    assert outcomes[-1] is error


@pytest.mark.parametrize(("value", "error"), [("x", TypeError), (-1, ValueError), (2.0, TypeError)])
@pytest.mark.parametrize("size", [1, 10, 1000])
def test_wrong_index_drawn_on_demand_comes_after_all_earlier_batches(value, error, size):
    """B31, decision 14: the message has the position in the epoch, and no whole batch before it is lost.

    Fails on a loader that drops the indices which were drawn together with the wrong one.
    """
    position = READ_AHEAD + 1017
    sampler = Values(*range(position), value, 0, 0)
    outcomes = drained(iter(PyDataloader(Ids(position), size, sampler=sampler)))
    assert outcomes[:-1] == cut(position, size, drop_last=True)
    assert type(outcomes[-1]) is error
    assert str(outcomes[-1]).endswith(f"at position {position}")


@pytest.mark.parametrize("sized", [True, False])
def test_error_of_a_sampler_that_is_read_whole_comes_from_iter(sized, num_workers):
    """B31: the object itself, no epoch without it, and the loader is usable afterwards."""
    error = ValueError("boom")
    sampler = (Sized if sized else Unsized)(2, error)
    loader = PyDataloader(Ids(3), sampler=sampler, num_workers=num_workers)
    for _ in range(2):
        with pytest.raises(ValueError) as caught:
            iter(loader)
        assert caught.value is error
    sampler.error = None
    assert list(loader) == [[0], [1]]


@pytest.mark.parametrize("late", [False, True])
def test_index_method_that_raises_is_an_error_of_the_sampler(late):
    """What ``__index__`` raises comes out as itself."""
    error = ZeroDivisionError("no index")

    class Broken:
        def __index__(self):
            raise error

    sampler = after_read_ahead(Broken()) if late else Values(0, Broken())
    loader = PyDataloader(Ids(3), 65_536, sampler=sampler)
    outcomes = []
    with pytest.raises(ZeroDivisionError) as caught:
        for batch in loader:
            outcomes.append(batch)
    assert caught.value is error
    assert [len(batch) for batch in outcomes] == [65_536] * late


@pytest.mark.parametrize("where", ["__iter__", "__len__", "__index__"])
def test_stop_iteration_from_a_sampler_is_a_runtime_error_at_iter(where):
    """Decision 15: let out of ``iter(loader)``, it would end an `itertools.chain` of loaders in silence."""
    error = StopIteration("not the end")

    def fail(*_):
        raise error

    sampler = Values(0, type("Broken", (), {"__index__": fail})())
    if where != "__index__":
        sampler = type("Sampler", (Values,), {where: fail})(0, 1)
    loader = PyDataloader(Ids(3), sampler=sampler)
    with pytest.raises(RuntimeError) as caught:
        list(itertools.chain(loader, loader))
    assert caught.value.__cause__ is error


def test_stop_iteration_from_an_index_drawn_on_demand_does_not_end_the_epoch_in_silence():
    """Decision 15: never a short epoch without an error."""
    class Broken:
        def __index__(self):
            raise StopIteration("not the end")

    iterator = iter(PyDataloader(Ids(3), 65_536, sampler=after_read_ahead(Broken(), 1, 2)))
    assert len(next(iterator)) == 65_536
    with pytest.raises(RuntimeError) as caught:
        next(iterator)
    assert type(caught.value.__cause__) is StopIteration


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("sized", [True, False])
def test_interrupt_in_a_sampler_comes_from_iter(kind, sized, num_workers):
    """Ctrl-C ends a long read, as itself, and the loader is usable afterwards."""
    error = kind()
    sampler = (Sized if sized else Unsized)(2, error)
    loader = PyDataloader(Ids(3), sampler=sampler, num_workers=num_workers)
    with pytest.raises(kind) as caught:
        iter(loader)
    assert caught.value is error
    sampler.error = None
    assert list(loader) == [[0], [1]]


def test_interrupt_in_a_sampler_drawn_on_demand_comes_at_once(num_workers):
    """Ctrl-C does not wait for its turn; what was drawn still comes, and the epoch does not end in silence."""
    error = KeyboardInterrupt()
    loader = PyDataloader(Ids(70_000), 10_000, sampler=Unsized(76_000, error), num_workers=num_workers)
    iterator = iter(loader)
    assert next(iterator) == list(range(10_000))
    with pytest.raises(KeyboardInterrupt) as caught:
        next(iterator)
    assert caught.value is error
    outcomes = drained(iterator)
    assert outcomes[:-1] == cut(70_000, 10_000)[1:]
    assert type(outcomes[-1]) is RuntimeError
    assert outcomes[-1].__cause__ is error
    with pytest.raises(StopIteration):
        next(iterator)


# ---- one-shot iterators ----

def test_iterator_that_is_used_up_warns_in_the_second_epoch(num_workers):
    """A generator as sampler is empty the second time: a RuntimeWarning names it, at the user's line."""
    loader = PyDataloader(Ids(5), 2, sampler=(i for i in range(3)), num_workers=num_workers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(iter(loader)) == [[0, 1], [2]]
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="sampler <generator .*used up.*epoch is empty") as caught:
            iterator = iter(loader)
        assert [warning.filename for warning in caught] == [__file__]
        assert list(iterator) == []


def test_iterator_that_is_empty_from_the_start_does_not_warn():
    """An empty first epoch is what the user asked for."""
    assert list(PyDataloader(Ids(5), sampler=iter([]))) == []


def test_iterator_with_indices_left_does_not_warn():
    """Only a silent empty epoch is worth a warning."""
    def endless():
        yield from itertools.repeat(1)

    loader = PyDataloader(Ids(5), 2, sampler=endless())
    for _ in range(3):
        assert next(iter(loader)) == [1, 1]


def test_empty_epoch_of_an_iterable_does_not_warn():
    """A list that was emptied is no iterator that was used up."""
    sampler = [0, 1]
    loader = PyDataloader(Ids(5), sampler=sampler)
    assert list(loader) == [[0], [1]]
    sampler.clear()
    assert list(loader) == []


def test_epoch_without_a_whole_batch_does_not_warn():
    """With drop_last a sampler that yields less than a batch is not one that yields nothing."""
    loader = PyDataloader(Ids(5), 2, sampler=[0], drop_last=True)
    assert list(loader) == list(loader) == []


def test_sized_sampler_that_can_be_read_once_warns():
    """An empty epoch where the sampler said that there are indices is worth a warning, whatever made it so."""

    class Once:
        def __init__(self):
            self.iterator = iter([2, 0])

        def __iter__(self):
            return self.iterator

        def __len__(self):
            return 2

    loader = PyDataloader(Ids(3), sampler=Once())
    assert list(loader) == [[2], [0]]
    with pytest.warns(RuntimeWarning, match="yields nothing"):
        assert list(loader) == []


def test_index_that_changes_its_mind_is_judged_once():
    """What was checked is what the dataset gets."""

    class Flips:
        asked = 0

        def __index__(self):
            self.asked += 1
            return -1 if self.asked == 1 else 1

    with pytest.raises(ValueError, match="got -1 at position 0"):
        iter(PyDataloader(Ids(3), sampler=[Flips()]))
