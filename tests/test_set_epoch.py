"""``set_epoch(k)``: the next ``iter()`` is epoch k, for the loader and for whoever else wants to know."""

import copy

import numpy as np
import pytest
from conftest import run_threaded
from toy_datasets import GatedDataset, Ids

from dataloader_rs import PyDataloader, PyDataset

LENGTH = 40


def load(**options):
    return PyDataloader(Ids(LENGTH), LENGTH, **{"shuffle": True, "seed": 6, **options})


def orders(count, **options):
    """The orders of the epochs 0 .. count - 1."""
    loader = load(**options)
    return [next(iter(loader)) for _ in range(count)]


class Told:
    """Remembers the epochs that it was told of."""

    def __init__(self):
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


class ToldDataset(Told, Ids):
    def __init__(self, length):
        Told.__init__(self)
        Ids.__init__(self, length)


class ToldSampler(Told):
    """As torch's DistributedSampler: the epoch decides the order."""

    def __iter__(self):
        return iter([self.epochs[-1] if self.epochs else 0, 1, 2])

    def __len__(self):
        return 3


def test_next_epoch_has_the_number_and_later_ones_go_on(num_workers):
    """The order is that of the epoch with this number, forward and back again, and counting goes on from there."""
    expected = orders(8)
    loader = load(num_workers=num_workers)
    seen = {}
    for start in (5, 0, 2, 2):
        loader.set_epoch(start)
        seen[start] = [next(iter(loader)) for _ in range(3)]
    assert seen == {start: expected[start:start + 3] for start in (5, 0, 2)}


def test_last_call_before_iter_counts():
    """Setting it twice is setting it once; it starts no epoch."""
    loader = load()
    loader.set_epoch(7)
    loader.set_epoch(3)
    assert loader.set_epoch(1) is None
    assert next(iter(loader)) == orders(2)[1]


def test_orders_without_a_seed_come_back_too(num_workers):
    """A loader that has no seed has orders of its own, which have numbers as well."""
    loader = load(seed=None, num_workers=num_workers)
    first, second = list(loader), list(loader)
    loader.set_epoch(0)
    assert [list(loader), list(loader)] == [first, second]


def test_epochs_under_way_keep_their_number(num_workers):
    """An iterator that was made before gives what it would have given."""
    expected = orders(2)
    loader = PyDataloader(Ids(LENGTH), LENGTH // 2, shuffle=True, seed=6, num_workers=num_workers)
    under_way = iter(loader)
    seen = next(under_way)
    loader.set_epoch(1)
    assert seen + next(under_way) == expected[0]
    assert sum(loader, []) == expected[1]


def test_work_in_progress_is_not_waited_for():
    """``set_epoch`` returns while a worker is stuck in an item of an earlier epoch."""
    dataset = GatedDataset(4, closed={0})
    loader = PyDataloader(dataset, num_workers=1)
    under_way = iter(loader)
    dataset.wait_until_started({0})
    loader.set_epoch(3)
    dataset.open()
    assert list(under_way) == [[0], [1], [2], [3]]


def test_largest_number_is_followed_by_zero():
    """Epochs are numbered by 64 bits."""
    loader = load()
    loader.set_epoch(2**64 - 1)
    last, first = list(loader), list(loader)
    assert last != first
    assert first == orders(1)


@pytest.mark.parametrize("value", [np.int64(3), np.uint64(3), np.array(3)], ids=repr)
def test_any_integer_is_a_number(value):
    """NumPy's integers too; whoever is told gets a plain int."""
    dataset = ToldDataset(LENGTH)
    loader = PyDataloader(dataset, LENGTH, shuffle=True, seed=6)
    loader.set_epoch(value)
    assert next(iter(loader)) == orders(4)[3]
    assert dataset.epochs == [3]
    assert type(dataset.epochs[0]) is int


@pytest.mark.parametrize("value", [True, 1.0, "1", None, np.float64(1)], ids=repr)
def test_number_of_a_wrong_type_is_a_type_error(value):
    """The message has the name, the rule and the value, and nothing has changed."""
    dataset = ToldDataset(LENGTH)
    loader = PyDataloader(dataset, LENGTH, shuffle=True, seed=6)
    loader.set_epoch(2)
    with pytest.raises(TypeError) as caught:
        loader.set_epoch(value)
    assert str(caught.value).startswith(f"epoch must be an integer, got {value!r}")
    assert (dataset.epochs, next(iter(loader))) == ([2], orders(3)[2])


@pytest.mark.parametrize("value", [-1, 2**64, -2**70])
def test_number_out_of_range_is_a_value_error(value):
    """The message has the name, the rule and the value, and nothing has changed."""
    sampler = ToldSampler()
    loader = PyDataloader(Ids(LENGTH), sampler=sampler)
    with pytest.raises(ValueError) as caught:
        loader.set_epoch(value)
    assert str(caught.value) == f"epoch must be >= 0 and < 2**64, got {value}"
    assert sampler.epochs == []


def test_sampler_and_dataset_are_told(num_workers):
    """Both, once for each call, and before the next ``iter()`` asks them anything."""
    dataset, sampler = ToldDataset(10), ToldSampler()
    loader = PyDataloader(dataset, 3, sampler=sampler, num_workers=num_workers)
    assert list(loader) == [[0, 1, 2]]
    loader.set_epoch(7)
    assert list(loader) == [[7, 1, 2]]
    assert list(loader) == [[7, 1, 2]]
    assert dataset.epochs == sampler.epochs == [7]


def test_object_behind_an_adapter_is_told():
    """``PyDataset.of(obj)`` passes it on to `obj`."""
    class Foreign(Told):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return index

    source = Foreign()
    PyDataloader(PyDataset.of(source)).set_epoch(4)
    assert source.epochs == [4]


def test_object_that_answers_every_attribute_is_not_told():
    """The method is looked up on the class; None turns an inherited one off."""
    class Answers(Ids):
        def __getattr__(self, name):
            raise AssertionError(name) if name == "set_epoch" else AttributeError(name)

    class TurnedOff(ToldDataset):
        set_epoch = None

    for dataset in (Answers(3), TurnedOff(3)):
        loader = PyDataloader(dataset)
        loader.set_epoch(2)
        assert list(loader) == [[0], [1], [2]]


def test_error_of_who_is_told_comes_out():
    """It is raised by ``set_epoch`` itself, and the loader goes on counting as before."""
    class Refusing(Ids):
        def set_epoch(self, epoch):
            raise OSError(f"no epoch {epoch}")

    loader = PyDataloader(Refusing(LENGTH), LENGTH, shuffle=True, seed=6)
    with pytest.raises(OSError, match="no epoch 5"):
        loader.set_epoch(5)
    assert next(iter(loader)) == orders(1)[0]


def test_sampler_that_is_empty_from_the_start_is_not_called_used_up():
    """The warning of a sampler that an earlier epoch has used up is about epochs that were read, not about numbers."""
    loader = PyDataloader(Ids(3), sampler=iter([]))
    loader.set_epoch(4)
    assert list(loader) == []
    loader.set_epoch(0)
    with pytest.warns(RuntimeWarning, match="used up"):
        assert list(loader) == []


def test_threads_that_start_epochs_share_the_numbers():
    """From the number that was set, each goes to one of them."""
    expected = orders(103)
    loader = load()
    loader.set_epoch(3)
    seen = run_threaded(lambda number: [next(iter(loader)) for _ in range(25)], 4)
    assert sorted(sum(seen, [])) == sorted(expected[3:])


def test_copy_starts_at_zero():
    """A copy carries arguments, not the place in a run."""
    loader = load()
    loader.set_epoch(5)
    assert next(iter(copy.copy(loader))) == orders(1)[0]


def test_generator_is_drawn_from_all_the_same(num_workers):
    """With ``generator=`` the orders come from its state, which no number of an epoch tells."""
    first, second = [load(seed=None, generator=np.random.default_rng(1), num_workers=num_workers) for _ in range(2)]
    second.set_epoch(9)
    assert [list(first), list(first)] == [list(second), list(second)]
