"""The order of shuffled epochs: seeds, epochs, and that nobody's order changes with an update."""

import array
import hashlib
import math
import random
import time

import numpy as np
import pytest
from reference import batches
from toy_datasets import Ids

from dataloader_rs import PyDataloader
from dataloader_rs._shuffle import VERSION

# Lengths up to this one are shuffled in a table, longer ones are computed index by index.
TABLE_MAX = 65_536


def orders(length, count, **options):
    """The orders of the first `count` epochs of a new loader."""
    loader = PyDataloader(Ids(length), max(length, 1), shuffle=True, **options)
    return [sum(loader, []) for _ in range(count)]


def digest(order):
    return hashlib.sha256(array.array("q", order).tobytes()).hexdigest()[:16]


# ---- frozen ----

@pytest.mark.parametrize(("seed", "epochs"), [
    (0, [[1, 4, 5, 0, 7, 6, 9, 8, 2, 3], [4, 7, 0, 5, 9, 3, 6, 2, 8, 1]]),
    (1, [[7, 2, 6, 8, 0, 1, 5, 9, 3, 4]]),
    (2**64 - 1, [[6, 5, 9, 2, 3, 7, 8, 0, 1, 4]]),
])
def test_order_of_a_small_dataset_is_frozen(seed, epochs, num_workers):
    """A change of these numbers reorders the epochs of everybody who gave a seed: it needs a new DLRS_ORDER_VERSION."""
    assert VERSION == 1
    assert orders(10, len(epochs), seed=seed, num_workers=num_workers) == epochs


@pytest.mark.parametrize(("length", "start", "digests"), [
    (65_536, [19129, 14709, 62528, 20634, 28466, 23212], ["e456a192d9d906b2", "12ff9f004bbcdd39"]),
    (65_537, [22878, 32234, 13266, 52107, 55046, 11938], ["aa61c7944606c68f", "628c75f98415171c"]),
    (100_003, [67767, 32234, 13266, 52107, 55046, 11938], ["410dcc3a08a87b89", "24865243049970c6"]),
])
def test_order_of_a_large_dataset_is_frozen(length, start, digests):
    """The same on either side of the length from which orders are computed."""
    assert VERSION == 1
    first, second = orders(length, 2, seed=1)
    assert first[:6] == start
    assert [digest(first), digest(second)] == digests


def test_order_of_an_enormous_dataset_is_frozen():
    """2**40 items can be shuffled, as no order is ever held; indices of more than 32 bits are frozen too."""
    loader = PyDataloader(Ids(1 << 40), 5, shuffle=True, seed=7)
    assert next(iter(loader)) == [50848686210, 170737346985, 566664846217, 726567371223, 1009805610600]


# ---- seeds and epochs ----

@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 1000, TABLE_MAX, TABLE_MAX + 1, 70_001])
def test_each_epoch_visits_every_item_once(length):
    """An order is a permutation, whether it is a table or computed."""
    for order in orders(length, 2, seed=3) + orders(length, 1):
        assert sorted(order) == list(range(length))


@pytest.mark.parametrize("length", [1000, 70_001])
def test_order_does_not_depend_on_how_it_is_loaded(length):
    """Same seed, same orders, for any number of workers, items in parallel, depth and batch size."""
    expected = orders(length, 2, seed=11)
    for options in ({"num_workers": 1}, {"num_workers": 4, "prefetch_depth": 5}, {"items_in_parallel": 3}):
        loader = PyDataloader(Ids(length), 97, shuffle=True, seed=11, **options)
        assert [sum(loader, []) for _ in range(2)] == expected


def test_shuffled_batches_are_cut_as_any_others(num_workers):
    """collate_fn, drop_last and batch size work on the shuffled order."""
    dataset = Ids(23)
    [order] = orders(23, 1, seed=2)
    for drop_last in (False, True):
        loader = PyDataloader(dataset, 4, shuffle=True, seed=2, drop_last=drop_last, collate_fn=tuple,
                              num_workers=num_workers)
        expected = batches(dataset, 4, order, tuple, drop_last)
        assert len(loader) == len(expected)
        assert list(loader) == expected


@pytest.mark.parametrize("length", [20, 1000, 70_001])
def test_epochs_of_one_loader_differ(length):
    """A new order every epoch, with a seed and without; unshuffled ones stay as they are."""
    for options in ({"seed": 5}, {}):
        seen = {tuple(order) for order in orders(length, 5, **options)}
        assert len(seen) == 5
        assert tuple(range(length)) not in seen


@pytest.mark.parametrize("length", [20, 70_001])
def test_seeds_and_epochs_have_nothing_in_common(length):
    """Neighbouring seeds do not run through each other's epochs."""
    seen = [tuple(order) for seed in (0, 1, 2, 2**32, 2**63, 2**64 - 1) for order in orders(length, 4, seed=seed)]
    assert len(set(seen)) == 24


def test_loaders_without_a_seed_differ():
    """Each has orders of its own, those made one right after the other too."""
    assert len({tuple(orders(1000, 1)[0]) for _ in range(20)}) == 20


@pytest.mark.parametrize("length", [20, 70_001])
def test_kth_iter_is_epoch_k_finished_or_not(length, num_workers):
    """An epoch that was not started to read, left in the middle, or still under way counts as one."""
    size = length // 2
    expected = orders(length, 5, seed=9)
    loader = PyDataloader(Ids(length), size, shuffle=True, seed=9, num_workers=num_workers)
    untouched = iter(loader)
    left = iter(loader)
    assert next(left) == expected[1][:size]
    del left
    under_way = iter(loader)
    assert next(under_way) == expected[2][:size]
    assert sum(loader, []) == expected[3]
    assert next(iter(loader)) == expected[4][:size]
    assert sum(under_way, []) == expected[2][size:]
    assert sum(untouched, []) == expected[0]


def test_asking_for_a_length_starts_no_epoch():
    """``len(loader)`` and ``repr`` leave the sequence of orders alone."""
    loader = PyDataloader(Ids(20), 20, shuffle=True, seed=9)
    assert (len(loader), repr(loader) != "") == (1, True)
    assert next(iter(loader)) == orders(20, 1, seed=9)[0]


def test_dataset_that_grows_is_shuffled_whole():
    """The length is asked anew each epoch, also across the length from which orders are computed."""
    dataset = Ids(3)
    loader = PyDataloader(dataset, 100_000, shuffle=True, seed=1)
    for length in (3, 5, TABLE_MAX + 5, 0, 2):
        dataset.length = length
        assert sorted(sum(loader, [])) == list(range(length))


def test_all_orders_of_four_items_are_about_equally_likely():
    """Small datasets are shuffled fairly: chi-squared over the 24 orders of 4 items, one epoch for each seed."""
    counts = dict.fromkeys(range(24), 0)
    for seed in range(4800):
        [order] = orders(4, 1, seed=seed)
        rank = sum(sum(later < index for later in order[position + 1:]) * math.factorial(3 - position)
                   for position, index in enumerate(order))
        counts[rank] += 1
    # 23 degrees of freedom: a fair shuffle is above 70 once in a million; the seeds are fixed, so this is no gamble.
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 70


# ---- scale ----

def test_ten_million_items_start_at_once():
    """An epoch of ten million items is not worked out before it starts: a thousand start in a few milliseconds each.

    Fails on an order held in a table, which takes 80 MB and a good part of a second for each epoch.
    """
    loader = PyDataloader(Ids(10_000_000), 4, shuffle=True, seed=1)
    start = time.perf_counter()
    for _ in range(1000):
        assert len(next(iter(loader))) == 4
    assert time.perf_counter() - start < 10


# ---- other people's random numbers ----

@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": True, "seed": 3}])
@pytest.mark.parametrize("length", [50, 70_000])
def test_global_random_state_is_untouched(options, length, num_workers):
    """B25: `random` and `numpy.random` are bit for bit as before, and seeding them changes no order."""
    def states():
        kind, keys, *rest = np.random.get_state()
        return random.getstate(), kind, keys.tolist(), rest

    before = states()
    loader = PyDataloader(Ids(length), 1000, num_workers=num_workers, **options)
    for _ in range(2):
        assert sum(map(len, loader)) == length
    assert states() == before


def test_seeding_the_program_does_not_seed_a_loader():
    """B25: a loader without a seed takes its own from the system, not from the program's generators."""
    seen = set()
    for _ in range(3):
        random.seed(0)
        np.random.seed(0)
        seen.add(tuple(orders(1000, 1)[0]))
    assert len(seen) == 3


def test_orders_are_the_same_with_another_loader_in_between():
    """B25: a validation pass between two epochs leaves the order of training as it was."""
    expected = orders(100, 3, seed=4)
    training = PyDataloader(Ids(100), 100, shuffle=True, seed=4)
    validation = PyDataloader(Ids(30), 7, shuffle=True)
    seen = []
    for _ in range(3):
        seen += list(training)
        list(validation)
    assert seen == expected
