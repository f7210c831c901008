"""Nothing is left of what a loader did: each public path is gone over again and again, and what is there is counted.

Counted are the objects that the collector tracks, by type; the blocks of Python's allocator; the bytes that the C
library has handed out; and, in a debug build of Python (`make leaks-debug`), all references. Whatever is kept for each
time makes one of these grow in every round of 20 times; what is made once, or now and then, does not.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import gc
import itertools
import random
import sys
import threading
import types
from collections.abc import Callable

import pytest
from conftest import FREE_THREADED, SLOWDOWN, eventually, worker_threads
from toy_datasets import Ids

from dataloader_rs import (
    BatchTimeoutError,
    PyDataloader,
    PyDataset,
    PyIterableDataset,
    default_collate,
    get_worker_info,
    pinning,
    sample_rng,
    share,
)

pytestmark = pytest.mark.slow

ROUND = 20
WARM_UP = 10

# A leak has no end. So what does not grow in one of these rounds is none, and most paths need only one. Free-threaded
# Python takes many: an object that another thread than its maker's has freed counts as a block in use until the maker
# needs room, or, if that has ended, until some thread takes over its memory. That levels off after up to 1000 times.
MOST_ROUNDS = 75 if FREE_THREADED else 10

# What may come on top in each round: half of one object for each time, or 128 bytes, since the C library counts the
# 2 KB that describe one more of its arenas, and has 16 or more of them when enough threads were there.
MOST_OBJECTS = ROUND // 2
MOST_BYTES = ROUND * 128


# ---- what is loaded; all classes are here, as free-threaded 3.13 never frees one ----


class Error(Exception):
    """What user code raises here."""


class Boxes(Ids):
    """Each sample is a few objects."""

    def __getitem__(self, index: int) -> list:
        return [index, str(index), {"index": index + 1000}]


class BoxesTogether(Boxes):
    def __getitems__(self, indices: list[int]) -> list:
        return [self[index] for index in indices]


class Failing(Boxes):
    """Every third item is an error."""

    def __getitem__(self, index: int) -> list:
        if index % 3 == 2:
            raise Error(str(index), [index])
        return super().__getitem__(index)


class FailingTogether(BoxesTogether):
    def __getitems__(self, indices: list[int]) -> list:
        if indices[0] == 0:
            raise Error(str(indices))
        return [None]  # too few


class Stuck(Boxes):
    """Item 1 comes when it is let go."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.go_on = threading.Event()

    def __getitem__(self, index: int) -> list:
        if index == 1:
            self.go_on.wait()
        return super().__getitem__(index)


class Stream(PyIterableDataset):
    def __init__(self, length: int, fails: bool = False) -> None:
        self.length = length
        self.fails = fails

    def __iter__(self):
        for number in range(self.length):
            yield [number, str(number)]
        if self.fails:
            raise Error("the end")


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.length


class ShardedStream(Stream):
    def shards(self, num_shards: int) -> list:
        return [Stream(self.length + number, self.fails) for number in range(num_shards)]


class Drawn(Ids):
    def __getitem__(self, index: int) -> float:
        return sample_rng().random()


class DrawnTogether(Ids):
    def __getitems__(self, indices: list[int]) -> list:
        return [sample_rng(offset).random() for offset in range(len(indices))]


class Informed(Ids):
    def __getitem__(self, index: int) -> object:
        return get_worker_info()


class Told(Boxes):
    """Wants to know the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Serial(Boxes):
    serial_dataset = True


class Nested(Ids):
    """An item is all batches of another loader."""

    def __getitem__(self, index: int) -> list:
        return list(PyDataloader(Boxes(3), 2, num_workers=index % 2))


class Arrays(Ids):
    def __getitem__(self, index: int) -> dict:
        return {"image": np.full((32, 32), index, np.float32), "label": index, "name": str(index)}


class Tensor:
    """Something that can be pinned."""

    def pin_memory(self) -> Tensor:
        return Tensor()


class Tensors(Ids):
    def __getitem__(self, index: int) -> dict:
        return {"x": Tensor(), "y": [Tensor()]}


class TorchDataset:
    """Stands in for torch.utils.data.Dataset, see `torch_like`."""


class OfTorch(TorchDataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> list:
        return [index]


class Sampler:
    """No length, and so read as it is needed."""

    def __init__(self, length: int, fails: bool) -> None:
        self.length = length
        self.fails = fails

    def __iter__(self):
        yield from range(self.length)
        if self.fails:
            raise Error("no more indices")


class SizedSampler(Sampler):
    def __len__(self) -> int:
        return self.length


np = pytest.importorskip("numpy")


# ---- the paths ----


def failing_collate(samples: list) -> None:
    raise Error(len(samples), samples)


def refusing_worker(worker_id: int) -> None:
    raise Error(worker_id)


def exhaust(loader, caught: int = 100) -> None:
    """Take every batch, and see that no more than so many fail."""
    iterator = iter(loader)
    while True:
        try:
            for _ in iterator:
                pass
            return
        except Error:
            caught -= 1
            assert caught >= 0


def epoch(dataset, *arguments, **options) -> None:
    exhaust(PyDataloader(dataset, *arguments, **options))


def construct(num_workers: int) -> None:
    loader = PyDataloader(Boxes(6), 2, num_workers=num_workers, shuffle=True, seed=1)
    len(loader), repr(loader)


def refuse(num_workers: int) -> None:
    for options in ({"batch_size": 0}, {"dataset": []}, {"sampler": 1}, {"timeout": -1}, {"seed": -1}):
        with contextlib.suppress(TypeError, ValueError):
            PyDataloader(**{"dataset": Boxes(6), "num_workers": num_workers, **options})


def early_break(num_workers: int) -> None:
    iterator = iter(PyDataloader(Boxes(40), 2, num_workers=num_workers))
    for _ in iterator:
        break


def unused_iterator(num_workers: int) -> None:
    iter(PyDataloader(Boxes(40), 2, num_workers=num_workers))


def in_a_cycle(num_workers: int) -> None:
    dataset = Boxes(40)
    dataset.loader = PyDataloader(dataset, 2, num_workers=num_workers)
    dataset.iterator = iter(dataset.loader)
    next(dataset.iterator)


def kept_error(num_workers: int) -> None:
    try:
        epoch_of = iter(PyDataloader(Failing(9), num_workers=num_workers))
        for _ in epoch_of:
            pass
    except Error as error:
        error.itself = error  # its traceback leads to the iterator, and so to a cycle


def ends_with_its_error(make_loader: Callable) -> None:
    try:
        for _ in make_loader():
            pass
    except Error:
        return
    raise AssertionError("no error came out")


def sampler_error(num_workers: int) -> None:
    for kind in (Sampler, SizedSampler):
        ends_with_its_error(lambda kind=kind: PyDataloader(Boxes(6), 2, sampler=kind(5, True), num_workers=num_workers))


def wrong_index(num_workers: int) -> None:
    for index in (-1, "text", 2**70):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            list(PyDataloader(Boxes(6), 2, sampler=[0, index], num_workers=num_workers))


def stream_error(num_workers: int) -> None:
    for kind, in_order in itertools.product((Stream, ShardedStream), (True, False)):
        epoch(kind(7, fails=True), 2, num_workers=num_workers, in_order=in_order)


def timeout(num_workers: int) -> None:
    dataset = Stuck(4)
    iterator = iter(PyDataloader(dataset, num_workers=num_workers, timeout=0.0005 * SLOWDOWN))
    with pytest.raises(BatchTimeoutError):
        for _ in iterator:
            pass
    dataset.go_on.set()


def batch_sampler(num_workers: int) -> None:
    epoch(Boxes(9), batch_sampler=[[0], [1, 2, 3], [4, 5]], num_workers=num_workers)
    epoch(Boxes(9), batch_sampler=([number] * 2 for number in range(4)), num_workers=num_workers)


def workers_start_and_end(num_workers: int) -> None:
    loader = PyDataloader(Informed(6), num_workers=num_workers, worker_init_fn=str, worker_exit_fn=str)
    exhaust(loader)
    loader.close()


def worker_that_cannot_start(num_workers: int) -> None:
    loader = PyDataloader(Boxes(6), num_workers=num_workers, worker_init_fn=refusing_worker)
    if num_workers > 0:
        ends_with_its_error(lambda: loader)


def random_numbers(num_workers: int) -> None:
    epoch(Drawn(4), 2, num_workers=num_workers, rng_seed=3)
    epoch(DrawnTogether(4), 2, num_workers=num_workers)


def recycled_arrays(num_workers: int) -> None:
    epoch(Arrays(8), 4, num_workers=num_workers, collate_fn=default_collate)


def arrays_that_cannot_be_stacked(num_workers: int) -> None:
    samples = PyDataset.of([{"x": np.zeros(2)}, {"x": np.zeros(3)}])
    with pytest.raises(ValueError):
        list(PyDataloader(samples, 2, num_workers=num_workers, collate_fn=default_collate))


def pinned(num_workers: int) -> None:
    epoch(Tensors(4), 2, num_workers=num_workers, pin_memory=True)


def shared(num_workers: int) -> None:
    epoch(share(Boxes(4)), num_workers=num_workers)
    share({"words": ["a", "b"], "sizes": (1, 2)})


def epoch_is_set(num_workers: int) -> None:
    loader = PyDataloader(Told(4), 2, num_workers=num_workers, shuffle=True, seed=0)
    for number in (3, 1):
        loader.set_epoch(number)
        exhaust(loader)


def across_epochs(num_workers: int) -> None:
    loader = PyDataloader(Boxes(6), 2, num_workers=num_workers, shuffle=True, across_epochs=True)
    exhaust(loader)
    next(iter(loader))
    exhaust(loader)
    loader.set_epoch(0)
    next(iter(loader))


def closed(num_workers: int) -> None:
    loader = PyDataloader(Boxes(20), 2, num_workers=num_workers)
    iterator = iter(loader)
    next(iterator)
    loader.close()
    with pytest.raises(RuntimeError):
        next(iterator)
    with loader:
        exhaust(loader)


def generators(num_workers: int) -> None:
    for generator in (random.Random(1), np.random.default_rng(1)):
        epoch(Boxes(6), 2, shuffle=True, generator=generator, num_workers=num_workers)


def serial(num_workers: int) -> None:
    epoch(Serial(6), 2, num_workers=num_workers)
    epoch(BoxesTogether(6), 2, num_workers=num_workers, serial_dataset=True)


def of_torch(num_workers: int) -> None:
    epoch(OfTorch(), 2, num_workers=num_workers)


def from_another_thread(num_workers: int) -> None:
    loader = PyDataloader(Boxes(6), 2, num_workers=num_workers)
    thread = threading.Thread(target=exhaust, args=(loader,))
    thread.start()
    exhaust(loader)
    thread.join()


PATHS: dict[str, Callable[[int], None]] = {
    function.__name__: function for function in (
        construct, refuse, early_break, unused_iterator, in_a_cycle, kept_error, sampler_error, wrong_index,
        stream_error, batch_sampler, workers_start_and_end, worker_that_cannot_start, random_numbers, recycled_arrays,
        arrays_that_cannot_be_stacked, pinned, shared, epoch_is_set, across_epochs, closed, generators, serial,
        of_torch, from_another_thread)
}
PATHS |= {
    "timeout": lambda num_workers: timeout(num_workers) if num_workers else None,
    "epoch": lambda num_workers: epoch(Boxes(9), 2, num_workers=num_workers),
    "shuffled": lambda num_workers: epoch(Boxes(9), 2, num_workers=num_workers, shuffle=True, drop_last=True),
    "shuffled_many": lambda num_workers: early_break_of(Ids(70_000), num_workers),
    "items_in_parallel": lambda num_workers: epoch(Boxes(9), 4, num_workers=num_workers, items_in_parallel=3),
    "item_error": lambda num_workers: epoch(Failing(9), 2, num_workers=num_workers),
    "item_error_in_parallel": lambda num_workers: epoch(Failing(9), 4, num_workers=num_workers, items_in_parallel=3),
    "getitems": lambda num_workers: epoch(BoxesTogether(9), 2, num_workers=num_workers),
    "getitems_error": lambda num_workers: wrong_getitems(num_workers),
    "collate_fn": lambda num_workers: epoch(Boxes(9), 2, num_workers=num_workers, collate_fn=tuple),
    "collate_fn_error": lambda num_workers: epoch(Boxes(9), 2, num_workers=num_workers, collate_fn=failing_collate),
    "any_order": lambda num_workers: epoch(Failing(9), 2, num_workers=num_workers, in_order=False),
    "no_batches": lambda num_workers: epoch(Boxes(9), None, num_workers=num_workers),
    "no_batches_in_parallel": lambda num_workers: epoch(Boxes(9), None, num_workers=num_workers, items_in_parallel=2),
    "sampler": lambda num_workers: epoch(Boxes(9), 2, num_workers=num_workers, sampler=Sampler(9, False)),
    "stream": lambda num_workers: epoch(Stream(9), 2, num_workers=num_workers),
    "sized_stream": lambda num_workers: epoch(SizedStream(9), 2, num_workers=num_workers, drop_last=True),
    "sharded_stream": lambda num_workers: epoch(ShardedStream(5), 2, num_workers=num_workers),
    "broken_off_stream": lambda num_workers: next(iter(PyDataloader(Stream(99), 2, num_workers=num_workers))),
    "nested": lambda num_workers: epoch(Nested(4), 2, num_workers=num_workers),
}

# Where NumPy takes part. Its wheel takes and drops references that a debug build does not see.
WITH_NUMPY = {"random_numbers", "recycled_arrays", "arrays_that_cannot_be_stacked", "generators"}


def early_break_of(dataset, num_workers: int) -> None:
    next(iter(PyDataloader(dataset, 2, num_workers=num_workers, shuffle=True, seed=5)))


def wrong_getitems(num_workers: int) -> None:
    iterator = iter(PyDataloader(FailingTogether(6), 3, num_workers=num_workers))
    with pytest.raises(Error):
        next(iterator)
    with pytest.raises(ValueError):
        next(iterator)


# ---- counting ----


class MallocInfo(ctypes.Structure):
    """struct mallinfo2 of the C library."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


@functools.cache
def malloc_info() -> Callable[[], MallocInfo] | None:
    """mallinfo2, where the C library has it."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = MallocInfo
    return function


def bytes_in_use() -> int:
    info = malloc_info()
    if info is None:
        return 0
    now = info()
    return now.uordblks + now.hblkhd


def count(before: set[str]) -> collections.Counter:
    """How much there is, by what it is, when all workers but those `before` have ended, and garbage is gone."""
    if not eventually(lambda: worker_threads() <= before, 0.01):
        assert eventually(lambda: gc.collect() >= 0 and worker_threads() <= before)
    for _ in range(2):
        gc.collect()
    # What other tests made may be here for good: CPython 3.13t makes classes immortal once there are threads.
    kinds = map(type, gc.get_objects())
    found = collections.Counter(kind for kind in kinds if type(kind).__hash__ is type.__hash__)
    found["blocks"] = sys.getallocatedblocks()
    found["references"] = getattr(sys, "gettotalrefcount", int)()
    found["bytes"] = bytes_in_use()
    return found


def grown(path: Callable[[int], None], num_workers: int, most_rounds: int = MOST_ROUNDS) -> dict[object, int]:
    """What grew each time that a path was gone over ROUND times more, and by how much at least."""
    before = worker_threads()
    for _ in range(WARM_UP):
        path(num_workers)
    last = count(before)
    growth: dict[object, int] = {}
    for number in range(most_rounds):
        for _ in range(ROUND):
            path(num_workers)
        now = count(before)
        # What is first met later did not grow in the first.
        kinds = now if number == 0 else growth
        growth = {kind: least for kind in kinds
                  if (least := min(now[kind] - last[kind], growth.get(kind, sys.maxsize))) > most_more(kind)}
        last = now
        if not growth:
            break
    return growth


def most_more(kind: object) -> int:
    """What may come on top in each round."""
    return MOST_BYTES if kind == "bytes" else MOST_OBJECTS


@pytest.fixture(autouse=True)
def torch_like(monkeypatch):
    """A torch that has datasets and a device."""
    device = types.SimpleNamespace(is_available=lambda: True, current_accelerator=lambda: None)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=device))
    monkeypatch.setitem(sys.modules, "torch.utils.data", types.SimpleNamespace(Dataset=TorchDataset))
    monkeypatch.setattr(pinning, "_warned", threading.Lock())


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", PATHS)
def test_nothing_is_left(name, num_workers):
    """Neither objects, nor memory, nor references add up, whatever path is taken."""
    found = grown(PATHS[name], num_workers)
    if name in WITH_NUMPY:
        found.pop("references", None)
    assert found == {}


@pytest.mark.parametrize("num_workers", [1, 4])
def test_nothing_is_left_with_other_numbers_of_workers(num_workers):
    """The same for the plain path."""
    assert grown(PATHS["epoch"], num_workers) == {}


LEAKED: list = []

malloc = ctypes.CDLL(None).malloc
malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
free = ctypes.CDLL(None).free
free.restype, free.argtypes = None, [ctypes.c_void_p]


@pytest.mark.parametrize(("leak", "found"), [
    (lambda num_workers: LEAKED.append([]), list),
    (lambda num_workers: LEAKED.append(b"%100d" % len(LEAKED)), "blocks"),
    (lambda num_workers: LEAKED.append(malloc(150)), "bytes"),
])
def test_one_object_for_each_time_is_found(leak, found):
    """A leak of the least kind is seen by these means."""
    try:
        assert found in grown(leak, 0, most_rounds=10)
    finally:
        if found == "bytes":
            for address in LEAKED:
                free(address)
        LEAKED.clear()
