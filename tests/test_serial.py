"""``serial_dataset``: one thread at a time is in the dataset, while all else goes on side by side."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
import weakref

import pytest
from conftest import eventually, run_threaded
from toy_datasets import PATIENCE, CountingDataset, GatedDataset, Ids

from dataloader_rs import PyDataloader, PyDataset, serial

SIZES = [(0, 1), (0, 3), (1, 1), (4, 1), (4, 3)]
every_size = pytest.mark.parametrize(("num_workers", "items_in_parallel"), SIZES)

RECORDS = 2000


class Records(PyDataset[bytes]):
    """B45: records of 8 bytes in one file, for which there is one handle."""

    def __init__(self, path, wait=0.0001) -> None:
        path.write_bytes(b"".join(number.to_bytes(8, "little") for number in range(RECORDS)))
        self.file = path.open("rb", buffering=0)
        self.wait = wait
        self.counting = threading.Lock()
        self.running = self.most_running = 0

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> int:
        with self.counting:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        self.file.seek(8 * index)
        time.sleep(self.wait)
        record = self.file.read(8)
        with self.counting:
            self.running -= 1
        return int.from_bytes(record, "little")


class SerialRecords(Records):
    serial_dataset = True


@pytest.fixture
def records_of(tmp_path):
    opened = []

    def make(kind=Records, **options):
        opened.append(kind(tmp_path / "records", **options))
        return opened[-1]

    yield make
    for dataset in opened:
        dataset.file.close()


class Meeting(CountingDataset):
    """Each item waits a moment for a second one to come in, which it must not."""

    def __init__(self, length, patience=0.01):
        super().__init__(length)
        self.patience = patience

    def fetch(self, index):
        with self.changed:
            self.changed.wait_for(lambda: self.most_running > 1, self.patience)
        return index


class Batched(Meeting):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Lazy(Meeting):
    """Reads only when what it returned is iterated."""

    def __getitems__(self, indices):
        return (self[index] for index in indices)


# ---- B45 ----

@pytest.mark.parametrize("how", ["argument", "class"])
@every_size
def test_shared_handle_is_read_by_one_thread_at_a_time(how, num_workers, items_in_parallel, records_of):
    """B45: of 2000 records none is wrong, and at most one call is under way."""
    dataset = records_of(SerialRecords if how == "class" else Records)
    options = {"serial_dataset": True} if how == "argument" else {}
    loader = PyDataloader(dataset, 32, num_workers=num_workers, items_in_parallel=items_in_parallel, **options)
    assert sum(loader, []) == list(range(RECORDS))
    assert dataset.most_running == 1


@pytest.mark.parametrize("has_getattr", [False, True])
def test_declaration_that_fails_is_no_answer(has_getattr):
    """An AttributeError from inside a property is not that there is none."""

    class Undecided(Ids):
        @property
        def serial_dataset(self) -> bool:
            return self.missing

    if has_getattr:
        def answer(self, name):
            raise AttributeError(name)

        Undecided.__getattr__ = answer
    with pytest.raises(AttributeError, match=r"missing|serial_dataset"):
        PyDataloader(Undecided(4))
    assert list(PyDataloader(Undecided(1), serial_dataset=False)) == [[0]]


def test_shared_handle_without_the_declaration_is_the_users_risk(records_of):
    """B45: what the declaration is for. Several calls are under way, and records are mixed up."""
    dataset = records_of(wait=0.001)
    seen = sum(PyDataloader(dataset, 32, num_workers=4), [])
    assert dataset.most_running > 1
    assert seen != list(range(RECORDS))


@pytest.mark.timing
def test_consumer_overlaps_with_a_serial_dataset(records_of):
    """B45: with a consumer as slow as the loader, both take at most 1.3 times as long as the slower one alone."""
    dataset = records_of()

    def seconds(pause):
        start = time.perf_counter()
        for _ in PyDataloader(dataset, 20, num_workers=4, serial_dataset=True):
            time.sleep(pause)
        return time.perf_counter() - start

    def attempt():
        loading = seconds(0)
        pause = loading / (RECORDS / 20)
        return seconds(pause) / max(loading, pause * (RECORDS / 20))

    assert min(attempt() for _ in range(3)) <= 1.3


# ---- what is serial ----

@every_size
@pytest.mark.parametrize("kind", [Meeting, Batched, Lazy])
def test_calls_never_overlap(kind, num_workers, items_in_parallel):
    """``__getitem__`` and ``__getitems__`` alike, also if the answer is a generator that reads later."""
    dataset = kind(12)
    loader = PyDataloader(dataset, 3, num_workers=num_workers, items_in_parallel=items_in_parallel, serial_dataset=True)
    assert sum(loader, []) == list(range(12))
    assert dataset.most_running == 1


def test_batches_that_are_fetched_whole_take_turns():
    """A ``__getitems__`` is not entered while another call of it is inside."""
    class Whole(Meeting):
        def __getitems__(self, indices):
            return [self[indices[0]], *indices[1:]]

    dataset = Whole(40)
    assert sum(PyDataloader(dataset, 4, num_workers=4, serial_dataset=True), []) == list(range(40))
    assert dataset.most_running == 1


def test_loaders_and_epochs_of_one_dataset_share_the_lock():
    """Three loaders, one without workers, and two epochs of each: one call at a time in all."""
    dataset = Meeting(12, 0.003)
    loaders = [PyDataloader(dataset, size, num_workers=workers, serial_dataset=True)
               for size, workers in ((2, 2), (3, 2), (1, 0))]
    iterators = [iter(loader) for loader in loaders for _ in range(2)]
    results = run_threaded(lambda number: sum(iterators[number], []), len(iterators))
    assert results == [list(range(12))] * len(iterators)
    assert dataset.most_running == 1


def test_object_that_cannot_be_hashed_or_referred_to_is_serial_too(num_workers):
    """A list behind two adapters is one object with one lock."""
    entered, leave = threading.Event(), threading.Event()
    inside = []

    class Items(list):
        __slots__ = ()
        __hash__ = None

        def __getitem__(self, index):
            inside.append(index)
            entered.set()
            assert leave.wait(PATIENCE)
            assert len(inside) == 1
            inside.clear()
            return index

    items = Items(range(3))
    loaders = [PyDataloader(PyDataset.of(items), num_workers=num_workers, serial_dataset=True) for _ in range(2)]
    results = []
    threads = [threading.Thread(target=lambda loader=loader: results.append(list(loader))) for loader in loaders]
    for thread in threads:
        thread.start()
    assert entered.wait(PATIENCE)
    leave.set()
    for thread in threads:
        thread.join()
    assert results == [[[0], [1], [2]]] * 2


def test_collate_fn_overlaps_with_the_dataset():
    """The collate_fn of the batch that came first and the item that came second wait for each other."""
    first_is_collated = threading.Event()

    class Second(CountingDataset):
        def fetch(self, index):
            assert index == self.started[0] or first_is_collated.wait(PATIENCE)
            return index

    def collate(samples):
        if samples == dataset.started[:1]:
            dataset.wait_until_started({0, 1})
            first_is_collated.set()
        return samples

    dataset = Second(2)
    loader = PyDataloader(dataset, num_workers=2, collate_fn=collate, serial_dataset=True, adaptive=False)
    assert list(loader) == [[0], [1]]


def test_workers_prefetch_while_the_consumer_is_busy():
    """As many batches as without it are loaded ahead."""
    dataset = CountingDataset(100)
    batches = iter(PyDataloader(dataset, 1, prefetch_depth=3, num_workers=2, serial_dataset=True))
    next(batches)
    dataset.wait_until_started(range(6))


def test_dataset_may_ask_itself(num_workers):
    """The thread that is inside may come in again, through an inner loader without workers too."""
    class Recursive(Ids):
        def __getitem__(self, index):
            if index == 0:
                return 0
            if index == 3:
                return sum(sum(PyDataloader(self, sampler=[1, 2], serial_dataset=True), []))
            return serial.serial_proxy_of(self)[index - 1] + 1

    loader = PyDataloader(Recursive(5), 5, num_workers=num_workers, serial_dataset=True)
    assert list(loader) == [[0, 1, 2, 3, 4]]


def test_error_leaves_the_lock_free(num_workers):
    """An exception arrives as ever, with its index, and the next item is fetched."""
    class Failing(Ids):
        def __getitem__(self, index):
            if index % 2:
                raise OSError(index)
            return index

    for batched in (False, True):
        if batched:
            Failing.__getitems__ = lambda self, indices: [self[index] for index in indices]
        iterator = iter(PyDataloader(Failing(6), num_workers=num_workers, serial_dataset=True))
        for index in range(6):
            if index % 2 == 0:
                assert next(iterator) == [index]
                continue
            with pytest.raises(OSError) as caught:
                next(iterator)
            assert f"{index}" in caught.value.__notes__[0]


@pytest.mark.parametrize("answer", [iter, tuple, list, dict.fromkeys])
def test_any_iterable_is_an_answer_of_getitems(answer, num_workers):
    """As without the lock."""
    class Returning(Ids):
        def __getitems__(self, indices):
            return answer(indices)

    assert list(PyDataloader(Returning(4), 3, num_workers=num_workers, serial_dataset=True)) == [[0, 1, 2], [3]]


def test_answer_without_an_end_is_a_wrong_count(num_workers):
    """B37: as without the lock, with the same words."""
    class Endless(Ids):
        def __getitems__(self, indices):
            while True:
                yield 0

    loader = PyDataloader(Endless(2), 2, num_workers=num_workers, serial_dataset=True)
    with pytest.raises(ValueError, match="at least 1004 samples for 2 indices"):
        list(loader)


# ---- declaring it ----

class Declared(Meeting):
    serial_dataset = True


def meet(dataset, watched=None, **options):
    """Are two workers inside the dataset at once, if each waits there for the other?"""
    list(PyDataloader(dataset, num_workers=2, adaptive=False, **options))
    return (watched or dataset).most_running > 1


def test_argument_wins_over_the_class():
    """None asks the class, True and False do not."""
    assert not meet(Declared(2))
    assert not meet(Declared(2), serial_dataset=None)
    assert not meet(Meeting(2), serial_dataset=True)
    assert meet(Meeting(2, PATIENCE))
    assert meet(Meeting(2, PATIENCE), serial_dataset=None)
    assert meet(Declared(2, PATIENCE), serial_dataset=False)


def test_instance_may_declare_it():
    """A dataset that knows only in its ``__init__`` how it reads can say so there."""
    dataset = Meeting(2)
    dataset.serial_dataset = True
    assert not meet(dataset)


def test_object_behind_an_adapter_may_declare_it():
    """``PyDataset.of(obj)``: what is asked is `obj`."""
    class Foreign:
        def __init__(self, inner):
            self.inner = inner

        def __len__(self):
            return len(self.inner)

        def __getitem__(self, index):
            return self.inner[index]

    class DeclaredForeign(Foreign):
        serial_dataset = True

    inner = Meeting(2, PATIENCE)
    assert meet(PyDataset.of(Foreign(inner)), inner)
    inner = Meeting(2)
    assert not meet(PyDataset.of(DeclaredForeign(inner)), inner)


def test_object_that_answers_every_attribute_declares_nothing(num_workers):
    """A ``__getattr__`` that answers everything is no declaration."""
    class Answers:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return index

        def __getattr__(self, name):
            return lambda *arguments: True

    assert list(PyDataloader(PyDataset.of(Answers()), num_workers=num_workers)) == [[0], [1]]


@pytest.mark.parametrize("value", [1, "yes", [True]], ids=repr)
def test_declaration_that_is_no_flag_is_a_type_error(value):
    """As argument and as attribute: the message has the name, the rule and the value."""
    class Wrong(Ids):
        serial_dataset = value

    for options in ({"dataset": Wrong(2)}, {"dataset": Ids(2), "serial_dataset": value}):
        with pytest.raises(TypeError) as caught:
            PyDataloader(**options)
        assert str(caught.value).startswith(f"serial_dataset must be True or False, got {value!r}")


# ---- lifetime ----

def test_loader_dropped_while_an_item_is_stuck_does_not_wait():
    """Neither dropping nor collecting waits for the item, and its lock stays that of the dataset."""
    dataset = GatedDataset(8, closed={0})
    loader = PyDataloader(dataset, num_workers=3, serial_dataset=True, defer_refcount=False)
    iterator = iter(loader)
    dataset.wait_until_started({0})
    start = time.monotonic()
    del iterator, loader
    gc.collect()
    assert time.monotonic() - start < PATIENCE / 4
    other = iter(PyDataloader(dataset, num_workers=1, sampler=[7], serial_dataset=True))
    assert 7 not in dataset.started
    dataset.open()
    assert next(other) == [7]
    assert dataset.most_running == 1


def test_program_that_ends_while_an_item_is_stuck_ends(run_script):
    """Exit waits for the lock as little as for the item."""
    run_script("""
        import threading
        import time
        from dataloader_rs import PyDataloader
        from toy_datasets import GatedDataset

        dataset = GatedDataset(8, closed={0})
        iterator = iter(PyDataloader(dataset, num_workers=3, serial_dataset=True))
        dataset.wait_until_started({0})
        """, timeout=15)


def test_dataset_is_freed_with_its_last_loader(num_workers):
    """The lock keeps neither the dataset nor itself."""
    before = len(serial._proxies)
    dataset = Ids(4)
    loaders = [PyDataloader(dataset, num_workers=num_workers, serial_dataset=True, defer_refcount=False)
               for _ in range(2)]
    assert [list(loader) for loader in loaders] == [[[0], [1], [2], [3]]] * 2
    assert len(serial._proxies) == before + 1
    reference = weakref.ref(dataset)
    del dataset, loaders
    assert eventually(lambda: gc.collect() >= 0 and reference() is None)
    assert len(serial._proxies) == before


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))],
                         ids=["copy", "deepcopy", "pickle"])
@pytest.mark.parametrize("argument", [True, None])
def test_duplicate_is_serial(duplicate, argument, num_workers):
    """A copy carries the argument; its dataset has a lock of its own if it is a dataset of its own."""
    loader = PyDataloader(SerialIds(6), 2, num_workers=num_workers, serial_dataset=argument)
    list(loader)
    other = duplicate(loader)
    assert other.serial_dataset is argument
    assert list(other) == list(loader) == [[0, 1], [2, 3], [4, 5]]
    shared = serial.serial_proxy_of(other.dataset) is serial.serial_proxy_of(loader.dataset)
    assert shared == (duplicate is copy.copy)


class SerialIds(Ids):
    serial_dataset = True


@pytest.mark.parametrize("num_workers", [0, 2])
def test_forked_child_finds_the_lock_free(num_workers, run_script):
    """A thread of the parent that is stuck in an item is not there in the child, nor is its turn."""
    run_script("""
        import os
        import signal
        import sys
        import threading
        import warnings
        from dataloader_rs import PyDataloader
        from toy_datasets import Ids

        warnings.filterwarnings("ignore", "This process", DeprecationWarning)
        parent = os.getpid()
        entered, leave = threading.Event(), threading.Event()

        class Stuck(Ids):
            serial_dataset = True

            def __getitem__(self, index):
                if os.getpid() == parent:
                    entered.set()
                    leave.wait(20)
                return index

        loader = PyDataloader(Stuck(4), 2, num_workers=int(sys.argv[1]))
        thread = threading.Thread(target=list, args=(PyDataloader(loader.dataset, num_workers=1),))
        thread.start()
        entered.wait(20)
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            assert list(loader) == [[0, 1], [2, 3]]
            os._exit(0)
        assert os.waitpid(child, 0) == (child, 0)
        leave.set()
        thread.join()
        """, str(num_workers), timeout=20)
