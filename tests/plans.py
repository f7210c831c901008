"""What random programs are made of: datasets that keep a record, errors that are planted, and `plans`, which draws the
arguments of a loader."""

from __future__ import annotations

import contextvars
import dataclasses
import gc
import math
import time

import pytest
from conftest import FREE_THREADED
from toy_datasets import Ids

from dataloader_rs import PyDataloader, PyDataset, PyIterableDataset, sample_rng

np = pytest.importorskip("numpy")
pytest.importorskip("hypothesis")

from hypothesis import strategies as st  # noqa: E402

# A dataset whose item i is this times the number of changes before, plus i.
VERSION_STEP = 1000

# What an epoch that its iterator belongs to is recognised by, in what its dataset is asked for.
EPOCH: contextvars.ContextVar[int] = contextvars.ContextVar("EPOCH", default=-1)

ERRORS = [ValueError, StopIteration, KeyboardInterrupt, GeneratorExit, SystemExit, IndexError, StopAsyncIteration]


class Planted(Exception):
    """In the reference, stands for the error that was planted under a key."""

    def __init__(self, key: object) -> None:
        super().__init__(key)
        self.key = key


class Faults:
    """Errors that are raised where they were planted, and all objects that were raised so far."""

    def __init__(self, kinds: dict, same_object: bool = False) -> None:
        self.kinds = kinds
        self.objects = {key: kind(key) for key, kind in kinds.items()} if same_object else {}
        self.raised: dict[object, list] = {key: [] for key in kinds}

    def check(self, key: object) -> None:
        if key in self.kinds:
            error = self.objects.get(key) or self.kinds[key](key)
            self.raised[key].append(error)
            raise error

    def is_of(self, error: object, key: object) -> bool:
        """Whether `error` is what was planted: the object itself, or, for a StopIteration, what it caused."""
        raised = self.raised.get(key, ())
        if issubclass(self.kinds[key], StopIteration):
            return type(error) is RuntimeError and any(error.__cause__ is one for one in raised)
        return any(error is one for one in raised)

    def forget(self) -> None:
        """Let go what the frames hold that the errors went through."""
        for raised in self.raised.values():
            for error in raised:
                error.__traceback__ = error.__context__ = error.__cause__ = None


class Source:
    """The data of a dataset: how long it is, how often it was changed, and who asked for what."""

    def __init__(self, length: int, faults: Faults, jitter: str, calls: list) -> None:
        self.lengths = [length]  # after 0, 1, ... changes
        self.faults = faults
        self.jitter = jitter
        self.calls = calls

    @property
    def version(self) -> int:
        return len(self.lengths) - 1

    def change(self, length: int) -> None:
        self.lengths.append(length)

    def answer(self, index: int, end: float | None = None) -> int:
        """Item `index`, if that is below `end`, or else the length."""
        self.calls.append((EPOCH.get(), index))
        version = self.version
        if self.jitter == "yields" and index % 2 == 0:
            time.sleep(0)
        elif self.jitter == "sleeps" and index % 3 == 0:
            time.sleep(0.0005)
        elif self.jitter == "collects" and index % 5 == 4:
            gc.collect(0)
        self.faults.check(index)
        if index >= (self.lengths[version] if end is None else end):
            raise IndexError(index)
        return index + VERSION_STEP * version


class Items(PyDataset):
    def __init__(self, source: Source) -> None:
        self.source = source

    def __len__(self) -> int:
        return self.source.lengths[-1]

    def __getitem__(self, index: int):
        return self.source.answer(index)


class Many(Items):
    def __getitems__(self, indices: list[int]):
        assert type(indices) is list and all(type(index) is int for index in indices)
        samples = [self.source.answer(index) for index in indices]
        return iter(samples) if len(samples) % 2 else samples


class Drawing(Items):
    def __getitem__(self, index: int):
        return self.source.answer(index), int(sample_rng().integers(2**62))


class Nesting(Items):
    """Each item takes an epoch of an inner loader: of one for all, or of its own."""

    def __init__(self, source: Source, num_workers: int) -> None:
        super().__init__(source)
        self.num_workers = num_workers
        self.inner = self.new_inner()

    def new_inner(self) -> PyDataloader:
        return PyDataloader(Ids(3), 2, num_workers=self.num_workers)

    def __getitem__(self, index: int):
        loader = self.inner if index % 2 else self.new_inner()
        assert list(loader) == [[0, 1], [2]]
        return self.source.answer(index)


class Stream(PyIterableDataset):
    def __init__(self, source: Source) -> None:
        self.source = source

    def __iter__(self):
        return self.read(range(self.source.lengths[-1]))

    def read(self, indices: range):
        for index in indices:
            yield self.source.answer(index, math.inf)


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.source.lengths[-1]


class Shards(Stream):
    def shards(self, num_shards: int) -> list:
        return [self.read(range(first, self.source.lengths[-1], num_shards)) for first in range(num_shards)]


class Collate:
    """A pair with what is collated, or an error, if one was planted for the first index."""

    def __init__(self, faults: Faults, draws: bool) -> None:
        self.faults = faults
        self.draws = draws

    def __call__(self, samples):
        self.faults.check(first_index(samples))
        return "collated", samples, int(sample_rng().integers(2**62)) if self.draws else None


def first_index(samples) -> int:
    while isinstance(samples, list | tuple):
        if not samples:
            return -1
        samples = samples[0]
    return samples % VERSION_STEP


class Unsized:
    """An iterable that does not say how long it is, of the values and then perhaps an error."""

    def __init__(self, values: list, faults: Faults) -> None:
        self.values, self.faults = values, faults

    def __iter__(self):
        for position, value in enumerate(self.values):
            self.faults.check(position)
            yield value
        self.faults.check(len(self.values))


class Sized(Unsized):
    def __len__(self) -> int:
        return len(self.values)


@dataclasses.dataclass
class Plan:
    """The arguments of a loader and what its dataset is like. All it prints is what differs from the defaults."""

    shape: str = "items"  # or sampler, batch_sampler, stream, sized stream, shards
    kind: str = "items"  # or many, drawing, nesting
    length: int = 0
    errors: dict = dataclasses.field(default_factory=dict)  # index: type
    same_object: bool = False  # each error is one object, raised again and again
    jitter: str = "none"
    arguments: dict = dataclasses.field(default_factory=dict)
    order: str = "sequential"  # or seed, random, numpy
    seed: int = 0
    yields: list = dataclasses.field(default_factory=list)  # by the sampler or batch_sampler
    iterable: str = "list"  # what yields them
    yield_fault: dict = dataclasses.field(default_factory=dict)  # position: type
    collate: str = "none"  # or wrap, default
    collate_errors: dict = dataclasses.field(default_factory=dict)  # first index: type
    init: str = "none"  # or counts, fails

    def __repr__(self) -> str:
        given = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
            if value != default:
                given.append(f"{field.name}={value!r}")
        return f"Plan({', '.join(given)})"

    def _repr_pretty_(self, printer, cycle: bool) -> None:
        """Hypothesis asks for this."""
        printer.text(repr(self))

    @property
    def is_stream(self) -> bool:
        return self.shape in ("stream", "sized stream", "shards")

    @property
    def is_one_shot(self) -> bool:
        return self.iterable == "generator"

    @property
    def num_workers(self) -> int:
        return self.arguments.get("num_workers", 0)

    @property
    def batch_size(self) -> int | None:
        return self.arguments.get("batch_size", 1)

    @property
    def drop_last(self) -> bool:
        return self.arguments.get("drop_last", False)

    @property
    def in_order(self) -> bool:
        return self.num_workers == 0 or self.arguments.get("in_order", True)

    @property
    def num_lanes(self) -> int:
        return self.num_workers if self.shape == "shards" and self.num_workers > 1 else 1

    @property
    def capacity(self) -> int:
        """How many batches may be in progress or waiting."""
        if self.num_workers == 0:
            return 0
        if "prefetch_factor" in self.arguments:
            return self.num_workers * self.arguments["prefetch_factor"]
        return self.num_workers + self.arguments.get("prefetch_depth", 2)


def error_kinds(keys, most: int):
    return st.dictionaries(keys, st.sampled_from(ERRORS), max_size=most)


@st.composite
def plans(draw) -> Plan:
    """Arguments over the whole interface. The simplest of each comes first."""

    def sometimes(strategy, default):
        return draw(strategy) if draw(st.booleans()) else default

    def choose(name: str, default: object, *others: object) -> None:
        value = draw(st.sampled_from([default, *others]))
        if value != default:
            plan.arguments[name] = value

    plan = Plan()
    plan.shape = draw(st.sampled_from(["items", "items", "sampler", "batch_sampler", "stream", "sized stream",
                                       "shards"]))
    plan.length = draw(st.integers(0, 14))
    plan.arguments["num_workers"] = draw(st.sampled_from([1, 0, 2, 3, 4]))
    plan.jitter = sometimes(st.sampled_from(["yields", "sleeps", "collects"]), "none")
    if plan.shape != "batch_sampler":
        choose("batch_size", 1, 2, 3, 5, None, 100)
        if plan.batch_size is not None:
            choose("drop_last", False, True)
    if plan.shape != "shards":  # which of them is there first, and which error ends the epoch, is open then
        choose("in_order", True, True, False)
    choose("adaptive", True, True, False)
    choose("defer_refcount", True, True, False)
    choose("prefetch_depth", 2, 2, 1, 3)
    if "prefetch_depth" not in plan.arguments:
        choose("prefetch_factor", None, None, 1, 2)
    if plan.num_workers:
        choose("timeout", 0, 100)
        plan.init = draw(st.sampled_from(["none", "none", "none", "counts", "counts", "fails"]))
    if not plan.is_stream:
        plan.kind = draw(st.sampled_from(["items", "items", "many", "drawing", "nesting"]))
        choose("items_in_parallel", 1, 1, 2, 3)
        choose("serial_dataset", None, None, True, False)
    indices = st.integers(0, max(plan.length - 1, 0))
    if plan.shape == "items":
        plan.order = draw(st.sampled_from(["sequential", "seed", "seed", "random", "numpy"]))
        plan.seed = draw(st.integers(0, 2**64 - 1)) if plan.order != "sequential" else 0
        # What was prepared and then dropped would have drawn from the generator, too.
        if plan.order in ("sequential", "seed"):
            choose("across_epochs", False, True, True)
    elif plan.shape in ("sampler", "batch_sampler"):
        choose("across_epochs", False, True, True)
        yielded = indices if plan.shape == "sampler" else st.lists(indices, max_size=4)
        plan.yields = draw(st.lists(yielded, max_size=14))
        plan.iterable = draw(st.sampled_from(["list", "unsized", "sized", "generator", "array"]))
        if plan.iterable in ("unsized", "sized"):
            # An error of another kind cannot wait for its turn, which test_batch_sampler.py has the tests for.
            kinds = [ValueError, StopIteration, OSError] if plan.shape == "batch_sampler" else ERRORS
            plan.yield_fault = sometimes(st.dictionaries(st.integers(0, len(plan.yields)), st.sampled_from(kinds),
                                                         max_size=1), {})
    plan.errors = sometimes(error_kinds(indices, 3), {})
    # On free-threaded builds one object that several threads raise at once is CPython's own risk.
    plan.same_object = not FREE_THREADED and draw(st.booleans())
    plan.collate = draw(st.sampled_from(["none", "wrap", "default"]))
    if plan.collate == "default" and (plan.batch_size is None or [] in plan.yields):
        plan.collate = "wrap"
    if plan.collate == "wrap":
        plan.collate_errors = sometimes(error_kinds(indices, 2), {})
    return plan
