"""Parallel equals reference: the batches of an epoch, in order, for any number of workers."""

import itertools
import textwrap
import threading

import pytest
from conftest import run_threaded
from reference import batches
from toy_datasets import CountingDataset, GatedDataset, Ids

from dataloader_rs import PyDataloader, PyDataloaderIter, PyDataset

# Every way the work is shared out: all small numbers of workers, the calling thread's own pool among them.
SHARES = [{"num_workers": workers, "prefetch_depth": depth, "items_in_parallel": parallel}
          for workers in range(5) for depth in (1, 2, 3) for parallel in (1, 2, 3) if workers or depth == 1]


class Squares(PyDataset):
    """Not its own index, so that a sample shows that it was fetched."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index * index


class Turns:
    """A sampler that yields the given runs of indices, one run for each epoch."""

    def __init__(self, *runs):
        self.runs = iter(runs)

    def __iter__(self):
        return iter(next(self.runs))


# ---- the reference ----

@pytest.mark.parametrize("share", SHARES, ids=lambda share: "-".join(map(str, share.values())))
def test_parallel_is_the_reference(share):
    """All small sizes: lengths 0-7, batch sizes 1-4 and 9, drop_last, with collate_fn and without."""
    for size, drop_last, collate_fn in itertools.product((1, 2, 3, 4, 9), (False, True), (None, tuple)):
        dataset = Squares(0)
        loader = PyDataloader(dataset, size, drop_last=drop_last, collate_fn=collate_fn, **share)
        for dataset.length in range(8):
            expected = batches(dataset, size, None, collate_fn, drop_last)
            assert len(loader) == len(expected)
            assert list(iter(loader)) == expected


@pytest.mark.parametrize("share", [share for share in SHARES if share["prefetch_depth"] == 1],
                         ids=lambda share: "-".join(map(str, share.values())))
def test_parallel_is_the_reference_with_a_sampler(share):
    """The same for indices that are given: repeats, backwards, some left out, beyond 64 bits."""
    dataset = Squares(9)
    for indices in ([], [8], [3, 3, 3, 3], list(range(8, -1, -1)), [2**70, 0, 7]):
        for size in (1, 2, 5):
            loader = PyDataloader(dataset, size, sampler=indices, **share)
            assert list(loader) == batches(dataset, size, indices)


@pytest.mark.parametrize(("workers", "parallel"), [(0, 1), (0, 3), (1, 1), (1, 3), (4, 1), (4, 3)])
def test_long_epoch_is_the_reference(workers, parallel):
    """Thousands of batches through a short ring: whoever finishes first, the order is exact."""
    dataset = Squares(6000)
    loader = PyDataloader(dataset, 3, 1, num_workers=workers, items_in_parallel=parallel)
    expected = batches(dataset, 3)
    for _ in range(2):
        assert list(loader) == expected


def test_every_item_is_fetched_once(num_workers):
    """No item twice, none left out, also where items of a batch are fetched side by side."""
    for parallel in (1, 3):
        dataset = CountingDataset(50)
        loader = PyDataloader(dataset, 4, num_workers=num_workers, items_in_parallel=parallel)
        assert sum(loader, []) == list(range(50))
        assert sorted(dataset.started) == list(range(50))


# ---- slow items ----

@pytest.mark.parametrize("parallel", [1, 3])
def test_slow_first_item_is_not_overtaken(parallel):
    """Item 0 finishes last and still comes out first."""
    dataset = GatedDataset(6, closed={0})
    iterator = iter(PyDataloader(dataset, 1, 6, num_workers=3, items_in_parallel=parallel))
    dataset.wait_until_started(range(6))
    dataset.open(0)
    assert list(iterator) == [[0], [1], [2], [3], [4], [5]]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_batches_finished_in_any_order_come_out_in_theirs(order):
    """Four batches under way, finished in each of the 24 orders."""
    dataset = GatedDataset(4, closed=range(4))
    iterator = iter(PyDataloader(dataset, 1, num_workers=4))
    dataset.wait_until_started(range(4))
    for index in order:
        dataset.open(index)
    assert list(iterator) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_items_finished_in_any_order_stand_in_theirs(order, workers):
    """Three items of a batch under way, finished in each of the 6 orders."""
    dataset = GatedDataset(3, closed=range(3))
    iterator = iter(PyDataloader(dataset, 3, num_workers=workers, items_in_parallel=3))

    def open_in_order(number):
        if number == 1:
            return next(iterator)
        dataset.wait_until_started(range(3))
        for index in order:
            dataset.open(index)
        return None

    assert run_threaded(open_in_order, 2)[1] == [0, 1, 2]


# ---- the iterator ----

def test_iterator_is_its_own_iterator(num_workers):
    """``iter(it) is it``, before, during and after an epoch."""
    iterator = iter(PyDataloader(Ids(3), num_workers=num_workers))
    assert type(iterator) is PyDataloaderIter
    assert iter(iterator) is iterator
    assert next(iter(iterator)) == [0]
    assert list(iterator) == [[1], [2]]
    assert iter(iterator) is iterator


@pytest.mark.parametrize("parallel", [1, 3])
def test_length_of_the_iterator_is_what_is_left(parallel, num_workers):
    """``len(it)`` is exact at each step, with drop_last and without, and ``list(it)`` of the rest has that length."""
    for length, size, drop_last in itertools.product((0, 1, 5, 6, 7), (1, 3), (False, True)):
        loader = PyDataloader(Ids(length), size, drop_last=drop_last, num_workers=num_workers,
                              items_in_parallel=parallel)
        for taken in range(len(loader) + 1):
            iterator = iter(loader)
            for _ in range(taken):
                next(iterator)
            assert len(iterator) == len(loader) - taken
            assert len(list(iterator)) == len(loader) - taken
            assert len(iterator) == 0


@pytest.mark.parametrize("parallel", [1, 3])
def test_after_the_end_every_next_raises_stop_iteration(parallel, num_workers):
    """An iterator that has ended stays ended, also when the dataset grows or other epochs run."""
    dataset = Ids(2)
    loader = PyDataloader(dataset, num_workers=num_workers, items_in_parallel=parallel)
    iterator = iter(loader)
    assert list(iterator) == [[0], [1]]
    dataset.length = 5
    assert len(list(loader)) == 5
    for _ in range(5):
        with pytest.raises(StopIteration):
            next(iterator)
        assert next(iterator, "nothing") == "nothing"
    assert list(iterator) == []


def test_length_of_the_dataset_is_asked_anew_each_epoch(num_workers):
    """Epochs are as long as the dataset was when they started."""
    dataset = Ids(3)
    loader = PyDataloader(dataset, 2, num_workers=num_workers)
    under_way = iter(loader)
    for length in (5, 0, 1):
        dataset.length = length
        assert len(loader) == (length + 1) // 2
        assert sum(loader, []) == list(range(length))
    assert sum(under_way, []) == [0, 1, 2]


def test_iterator_outlives_its_loader(num_workers):
    """``iter(PyDataloader(...))`` is enough to hold."""
    iterator = iter(PyDataloader(Ids(5), 2, num_workers=num_workers))
    assert list(iterator) == [[0, 1], [2, 3], [4]]


# ---- several iterators of one loader ----

@pytest.mark.parametrize("parallel", [1, 3])
def test_iterators_of_one_loader_are_independent(parallel, num_workers):
    """Interleaved, one ahead of the other, one dropped in the middle: each gives its own epoch, whole."""
    loader = PyDataloader(Squares(7), 2, num_workers=num_workers, items_in_parallel=parallel)
    expected = list(loader)
    assert list(zip(loader, loader, loader, strict=True)) == [(batch,) * 3 for batch in expected]
    ahead, behind, dropped = iter(loader), iter(loader), iter(loader)
    assert next(ahead) == next(dropped) == expected[0]
    assert next(ahead) == expected[1]
    del dropped
    assert next(behind) == expected[0]
    assert (len(ahead), len(behind)) == (2, 3)
    assert list(ahead) == expected[2:]
    assert list(behind) == expected[1:]


def test_many_iterators_started_at_once_are_all_served(num_workers):
    """Far more epochs under way than there are workers, taken from in every order."""
    loader = PyDataloader(Squares(9), 2, num_workers=num_workers)
    expected = list(loader)
    iterators = [iter(loader) for _ in range(30)]
    for number, batch in enumerate(expected):
        for iterator in iterators[::-1 if number % 2 else 1]:
            assert next(iterator) == batch
    for iterator in iterators:
        assert list(iterator) == []


def test_iterators_of_one_loader_take_turns():
    """Fair: an epoch started later is served side by side with one that has a hundred batches to go.

    Fails on a pool that serves its epochs first come, first served.
    """
    dataset = GatedDataset(200, closed={0})
    first_run, second_run = range(100), range(100, 200)
    loader = PyDataloader(dataset, 1, 100, sampler=Turns(first_run, second_run), num_workers=1)
    first = iter(loader)
    dataset.wait_until_started({0})
    second = iter(loader)
    dataset.open(0)
    assert sum(first, []) == list(first_run)
    assert sum(second, []) == list(second_run)
    # One worker: the two runs alternate as long as both have work.
    assert 40 <= sum(index >= 100 for index in dataset.started[:100]) <= 60


def test_iterator_is_served_while_another_is_stuck():
    """An item that does not return holds up its own epoch only."""
    dataset = GatedDataset(6, closed={0})
    loader = PyDataloader(dataset, 1, sampler=Turns([0, 1], [2, 3, 4]), num_workers=2)
    stuck = iter(loader)
    dataset.wait_until_started({0})
    assert list(iter(loader)) == [[2], [3], [4]]
    dataset.open(0)
    assert list(stuck) == [[0], [1]]


def test_epochs_of_one_loader_on_several_threads_are_whole(num_workers):
    """Any thread may iterate: each gets complete epochs, in order."""
    loader = PyDataloader(Squares(40), 3, num_workers=num_workers, items_in_parallel=2)
    expected = batches(Squares(40), 3)
    assert run_threaded(lambda number: [list(loader) for _ in range(5)], 4) == [[expected] * 5] * 4


# ---- things that cannot be pickled ----

B53 = """
    import threading
    from dataloader_rs import PyDataloader, PyDataset

    def make(source):
        class Local(PyDataset):
            def __init__(self):
                self.file = open(source, "rb")
                self.lock = threading.Lock()
                self.numbers = (number for number in range(100))
                self.module = threading
                self.function = lambda index: index * 2
                self.seen = []

            def __len__(self):
                return 8

            def __getitem__(self, index):
                with self.lock:
                    self.seen.append(self)
                    next(self.numbers)
                return self.function(index)

        return Local()

    dataset = make(SOURCE)
    for num_workers in (0, 1, 4):
        loader = PyDataloader(dataset, 2, num_workers=num_workers, collate_fn=lambda batch: batch[0])
        assert list(loader) == [0, 4, 8, 12]
        assert loader.dataset is dataset
    assert len(dataset.seen) == 24
    assert all(seen is dataset for seen in dataset.seen)
    dataset.file.close()
    print("done")
"""


@pytest.mark.parametrize("way", ["script", "-c", "standard input"])
def test_nothing_needs_to_be_picklable(way, run_script):
    """B53: local classes, open files, locks, generators, modules, lambdas; in a script without a guard, -c, stdin."""
    program = textwrap.dedent(B53).replace("SOURCE", repr(__file__))
    if way != "script":
        given, feed = (["-c", program], "") if way == "-c" else ([], program)
        program = f"""
            import subprocess, sys
            subprocess.run([sys.executable, "-W", "error", *{given!r}], input={feed!r}, text=True, check=True)
        """
    assert run_script(program).stdout == "done\n"


def test_dataset_on_workers_is_the_object_itself(num_workers):
    """B53: handed over by reference: the same dataset, and the very samples that it returned."""
    class Objects(Ids):
        def __init__(self, length):
            super().__init__(length)
            self.items = [object() for _ in range(length)]
            self.seen = set()

        def __getitem__(self, index):
            self.seen.add((id(self), threading.get_ident() == main))
            return self.items[index]

    main = threading.get_ident()
    dataset = Objects(6)
    samples = sum(PyDataloader(dataset, 4, num_workers=num_workers), [])
    assert all(sample is item for sample, item in zip(samples, dataset.items, strict=True))
    assert dataset.seen == {(id(dataset), num_workers == 0)}
