"""How many workers take part and who goes first: what `adaptive` promises, and the pieces of long batches."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from array import array

import pytest
from conftest import FREE_THREADED, eventually
from toy_datasets import Ids

from dataloader_rs import PyDataloader, PyDataset

LIMIT = 30.0  # seconds; a wait that takes longer hangs


class Switchable(Ids):
    """``dataset[i]`` is what ``dataset.fetch(i)`` returns, which may be changed between two epochs."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.fetch = lambda index: index

    def __getitem__(self, index: int) -> int:
        return self.fetch(index)


def exhaust(loader) -> int:
    return sum(1 for _ in loader)


def burn(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class Crowd:
    """Waits in items until as many threads as there are workers wait at once."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.size = size

    def __call__(self, index: int) -> int:
        self.barrier.wait(LIMIT)
        return index


class ImpatientCrowd(Crowd):
    """The same, but they keep looking whether the others are there, which is computing."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.lock = threading.Lock()
        self.arrived = 0

    def __call__(self, index: int) -> int:
        with self.lock:
            self.arrived += 1
            all_there = -(-self.arrived // self.size) * self.size
        end = time.perf_counter() + LIMIT
        while self.arrived < all_there and time.perf_counter() < end:
            pass
        assert self.arrived >= all_there, "the others did not come"
        return index


class Meetings:
    """Counts the items, and how many of them were begun while another one was under way."""

    def __init__(self, fetch) -> None:
        self.fetch = fetch
        self.lock = threading.Lock()
        self.under_way = self.begun = self.met = 0

    def __call__(self, index: int) -> int:
        with self.lock:
            self.begun += 1
            self.met += self.under_way > 0
            self.under_way += 1
        self.fetch(self)
        with self.lock:
            self.under_way -= 1
        return index

    def share(self, loader, seconds: float) -> float:
        """The share of items that met others, in epochs that take about so long."""
        self.begun = self.met = 0
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            exhaust(loader)
        return self.met / self.begun


def fight(meetings: Meetings) -> None:
    """Takes 0.1 ms alone, and six times as long for each of two."""
    burn(0.0001)
    if meetings.under_way > 1:
        burn(0.0005)


def wait(meetings: Meetings) -> None:
    time.sleep(0.001)


# ---- items that wait for each other ----


@pytest.mark.parametrize("crowd", [Crowd, ImpatientCrowd])
@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize(("num_workers", "items_in_parallel"), [(2, 1), (4, 1), (1, 3), (2, 2)])
def test_items_that_wait_for_each_other_do_not_hang(num_workers, items_in_parallel, adaptive, crowd):
    """A barrier of all workers inside ``__getitem__`` is passed, also when most of them were parked just before."""
    num_threads = num_workers * items_in_parallel
    dataset = Switchable(num_threads * (40 if crowd is Crowd else 10))
    loader = PyDataloader(dataset, items_in_parallel, num_workers=num_workers, items_in_parallel=items_in_parallel,
                          adaptive=adaptive)
    exhaust(loader)
    for _ in range(3):
        dataset.fetch = crowd(num_threads)
        assert [index for batch in loader for index in batch] == list(range(len(dataset)))
        dataset.fetch = lambda index: index  # cheap: one worker is enough
        exhaust(loader)


@pytest.mark.parametrize("crowd", [Crowd, ImpatientCrowd])
def test_items_that_wait_for_each_other_between_others_do_not_hang(crowd):
    """They meet also while the loader tries out fewer workers, for items that compute."""
    dataset = Switchable(600)
    meet = crowd(4)
    dataset.fetch = lambda index: meet(index) if index // 4 % 10 == 0 else burn(0.001)
    loader = PyDataloader(dataset, 1, num_workers=4)
    for _ in range(3):
        assert exhaust(loader) == 600


@pytest.mark.parametrize("num_workers", [2, 4])
def test_items_that_wait_for_each_other_need_no_consumer(num_workers):
    """Parked workers are let go also while nobody is inside ``next()``."""
    dataset = Switchable(400)
    loader = PyDataloader(dataset, num_workers=num_workers)
    exhaust(loader)
    crowd = Crowd(num_workers)
    arrived = threading.Semaphore(0)

    def fetch(index: int) -> int:
        if 200 <= index < 200 + num_workers:
            crowd(index)
            arrived.release()
        return index

    dataset.fetch = fetch
    iterator = iter(loader)
    for _ in range(200 - num_workers):
        next(iterator)
    for _ in range(num_workers):
        next(iterator)
    for _ in range(num_workers):
        assert arrived.acquire(timeout=LIMIT)
    assert sum(1 for _ in iterator) == 200


def test_consumer_that_waits_for_an_item_outside_next_gets_it():
    """What there is room for is fetched although the consumer never asks for it, however cheap items were before."""
    dataset = Switchable(1000)
    loader = PyDataloader(dataset, num_workers=1, prefetch_depth=2)
    exhaust(loader)
    done = [threading.Event() for _ in range(1000)]

    def fetch(index: int) -> int:
        done[index].set()
        return index

    dataset.fetch = fetch
    for index, _ in enumerate(loader):
        if index % 100 == 0:
            assert all(event.wait(LIMIT) for event in done[index : index + 4])


@pytest.mark.timing
@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_slow_items_after_cheap_ones_are_handed_over_at_once(num_workers, adaptive):
    """That thousands of items took no time says nothing about the next: its batch is delivered when it is ready."""
    dataset = Switchable(2040)
    ready: dict[int, float] = {}

    def fetch(index: int) -> int:
        if index >= 2000:
            time.sleep(0.02)
            ready[index] = time.perf_counter()
        return index

    def delay() -> float:
        dataset.fetch = fetch
        found = []
        asked = 0.0
        for (index,) in PyDataloader(dataset, num_workers=num_workers, adaptive=adaptive):
            now = time.perf_counter()
            if index >= 2000:
                found.append(now - max(ready[index], asked))
            asked = now
        return statistics.median(found)

    assert eventually(lambda: delay() < 0.003)


# ---- how many take part ----


@pytest.mark.timing
def test_workers_in_each_others_way_are_parked_and_come_back():
    """Where one gets more done than two, one works; where two get twice as much done, two do, within a second."""
    dataset = Switchable(400)
    loader = PyDataloader(dataset, 4, num_workers=2)
    for _ in range(2):
        dataset.fetch = fighting = Meetings(fight)
        assert eventually(lambda: fighting.share(loader, 0.3) < 0.2, 20.0)
        dataset.fetch = waiting = Meetings(wait)
        waiting.share(loader, 1.0)
        assert eventually(lambda: waiting.share(loader, 0.5) > 0.6, 10.0)


@pytest.mark.timing
@pytest.mark.parametrize("batch_size", [1, 16])
def test_workers_whose_items_wait_are_soon_all_awake(batch_size):
    """More workers than processors begin with as many as those; where items wait for 2 ms, the others come at once."""
    lock = threading.Lock()
    under_way: set[int] = set()

    def time_until_all_are_awake() -> float:
        seen = []

        def wait(index: int) -> int:
            with lock:
                under_way.add(threading.get_ident())
                if len(under_way) == 16:
                    seen.append(time.perf_counter())
            time.sleep(0.002)
            with lock:
                under_way.discard(threading.get_ident())
            return index

        dataset = Switchable(100 * batch_size)
        dataset.fetch = wait
        with PyDataloader(dataset, batch_size, num_workers=16) as loader:
            start = time.perf_counter()
            exhaust(loader)
        return seen[0] - start if seen else LIMIT

    assert eventually(lambda: time_until_all_are_awake() < 0.05)


def num_at_once(dataset, waiting: float) -> float:
    """How many items of an epoch wait at once on average, with 4 workers. Their waits add up to `waiting` seconds."""
    with PyDataloader(dataset, num_workers=4) as loader:
        start = time.perf_counter()
        exhaust(loader)
        return waiting / (time.perf_counter() - start)


@pytest.mark.timing
@pytest.mark.parametrize("one_in", [2, 4])
def test_few_items_that_wait_among_many_that_take_nothing_overlap(one_in):
    """Half or a quarter of the items wait for 2 ms, and the window has room for 3 or 2 of them. Fails where the average
    forgets a long item by the next short one."""

    def wait(index: int) -> int:
        if index % one_in == 0:
            time.sleep(0.002)
        return index

    dataset = Switchable(200 * one_in)
    dataset.fetch = wait
    assert eventually(lambda: statistics.median(num_at_once(dataset, 200 * 0.002) for _ in range(7)) > 1.5)


@pytest.mark.timing
def test_items_that_wait_in_bursts_overlap():
    """Bursts of 30 items that wait for 4 ms, with 2,000 between them that take nothing. Fails where each burst begins
    with one worker, as if nothing had been found out."""
    dataset = Switchable(5 * 2030)
    dataset.fetch = lambda index: time.sleep(0.004 * (index % 2030 < 30)) or index
    assert eventually(lambda: statistics.median(num_at_once(dataset, 5 * 30 * 0.004) for _ in range(5)) > 1.4)


@pytest.mark.timing
def test_no_worker_is_parked_without_adaptive():
    """`adaptive=False`: items that wait for each other meet at once, and not only when one of them has waited 5 ms."""
    dataset = Switchable(200)
    loader = PyDataloader(dataset, num_workers=2, adaptive=False)

    def time_to_meet() -> float:
        dataset.fetch = lambda index: index
        exhaust(loader)
        dataset.fetch = Crowd(2)
        iterator = iter(loader)
        start = time.perf_counter()
        next(iterator)
        elapsed = time.perf_counter() - start
        exhaust(iterator)
        return elapsed

    assert eventually(lambda: time_to_meet() < 0.003)


# ---- long batches are fetched in pieces ----


class Slow(PyDataset):
    """Items of 0.2 ms, long enough that a batch of eight is fetched in pieces; some raise."""

    def __init__(self, length: int, failing: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self.length = length
        self.failing = failing

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        burn(0.0002)
        if index in self.failing:
            raise LookupError(index)
        return index


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("order", ["range", "list", "array", "shuffle", "endless"])
def test_pieces_make_the_same_batches(num_workers, order):
    """Whatever the indices come from, batches hold the right items in the right order."""
    indices = [index * 7 % 45 for index in range(45)]
    arguments: dict = {
        "range": {},
        "list": {"sampler": indices},
        "array": {"sampler": array("q", indices)},
        "shuffle": {"shuffle": True, "seed": 3},
        "endless": {"sampler": (index for index in indices)},
    }[order]
    expected = list(PyDataloader(Ids(45), 8, **{**arguments, "sampler": indices} if order == "endless" else arguments))
    assert list(PyDataloader(Slow(45), 8, num_workers=num_workers, **arguments)) == expected


@pytest.mark.parametrize("num_workers", [1, 3])
def test_error_in_a_piece_names_its_item(num_workers):
    """Each item of a long batch in turn raises: the note has the right index and position, and others are not lost."""
    for failing in range(16, 24):
        loader = PyDataloader(Slow(40, frozenset({failing})), 8, num_workers=num_workers)
        iterator = iter(loader)
        assert [next(iterator), next(iterator)] == [list(range(8)), list(range(8, 16))]
        with pytest.raises(LookupError) as caught:
            next(iterator)
        assert caught.value.args == (failing,)
        assert f"index {failing} (position {failing - 16} of batch 2)" in caught.value.__notes__[0]
        assert list(iterator) == [list(range(24, 32)), list(range(32, 40))]


# ---- the consumer goes first ----


def delays(dataset, batch_size: int, num_workers: int) -> list[float]:
    """How long each batch of an epoch waits, from when it was ready or asked for, whichever came later."""
    ready: dict[int, float] = {}
    numbers = itertools.count()

    def stamp(samples: list) -> int:
        number = next(numbers)
        ready[number] = time.perf_counter()
        return number

    iterator = iter(PyDataloader(dataset, batch_size, num_workers=num_workers, collate_fn=stamp))
    found = []
    while True:
        asked = time.perf_counter()
        number = next(iterator, None)
        if number is None:
            return found
        found.append(time.perf_counter() - max(asked, ready.pop(number)))


@pytest.mark.timing
@pytest.mark.skipif(FREE_THREADED, reason="without the GIL nobody has to let anybody in")
def test_consumer_is_let_in_between_items():
    """Beside 4 workers of pure Python, a batch that is ready is handed over much sooner than the GIL is (5 ms)."""
    assert eventually(lambda: statistics.quantiles(delays(Slow(1600), 8, 4), n=20)[-1] < 0.002, LIMIT)


@pytest.mark.timing
@pytest.mark.skipif(FREE_THREADED, reason="without the GIL nobody has to let anybody in")
def test_consumer_is_let_in_before_the_next_item():
    """A worker whose batch the loop waits for lets it in before it goes on, however long its next item takes."""
    dataset = Switchable(160)
    dataset.fetch = lambda index: burn(0.004)
    assert eventually(lambda: statistics.median(delays(dataset, 4, 1)) < 0.002, LIMIT)
