"""Wrong values for every argument of every public callable, and datasets, samplers and streams that lie: a clear error,
or the right result. What comes of each pair is data: `VALUES` says what a value is, a rule what it makes of it."""

import inspect
import itertools
import math
import random
import re
import sys
import threading
import types

import numpy as np
import pytest
from conftest import without_address
from reference import drained
from toy_datasets import PATIENCE, Calls, Ids

import dataloader_rs
from dataloader_rs import PyDataloader, PyDataset, PyIterableDataset, collate, default_collate, register_collate, share
from dataloader_rs import sample_rng as rng_of_sample

LONGEST_MESSAGE = 700


class Text(str):
    """A str that cannot be put into a message."""

    def __format__(self, spec):
        raise RuntimeError("no format")

    __str__ = __len__ = __getitem__ = __radd__ = __format__


class Nameless(type):
    """The metaclass of classes that will not say their name."""

    @property
    def __name__(cls):
        raise RuntimeError("no name")

    def __repr__(cls):
        raise RuntimeError("no repr")


class Unhashable(type):
    def __hash__(cls):
        raise RuntimeError("no hash")


def _raises(*ignored):
    raise ZeroDivisionError("mine")


def instance(name, bases=(), meta=type, **methods):
    """An object of a new class with these methods."""
    return meta(name, bases, methods)()


def its_own_item():
    items = []
    items.append(items)
    return items


def pretending(kind):
    """An object whose ``__class__`` is not its type; nor does it have a repr."""
    return instance("Liar", __class__=kind, __repr__=_raises)


class Value:
    """What a value is: the integer and the number that stand for it, or None, and what else arguments ask for.

    `mine`: its own methods raise a ZeroDivisionError, which comes out where they are called.
    """

    def __init__(self, make, integer=None, real=None, *, iterable=False, mine=()):
        self.make, self.integer, self.real, self.iterable, self.mine = make, integer, real, iterable, mine


def number(value, integer=True, iterable=False):
    real = math.inf if integer and abs(int(value)) > 10**300 else float(value)
    return Value(lambda: value, int(value) if integer else None, real, iterable=iterable)


VALUES = {
    **{str(value): number(value) for value in (0, -1, 3, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 2**64 + 1, -2**63)},
    "10**5000": number(10**5000),
    "-10**5000": Value(lambda: -10**5000, -10**5000, -math.inf),
    "int64": number(np.int64(3)), "uint64": number(np.uint64(2**64 - 1)), "0-d": number(np.array(3), iterable=True),
    **{str(value): number(value, False) for value in (1.0, 1.5, math.nan, math.inf, -math.inf, np.float64(2.5))},
    "True": Value(lambda: True), "False": Value(lambda: False), "np.True_": Value(lambda: np.True_),
    "None": Value(lambda: None), "b'3'": Value(lambda: b"3", iterable=True), "'3'": Value(lambda: "3", iterable=True),
    "[]": Value(list, iterable=True), "dict": Value(dict, iterable=True), "object": Value(object),
    "its own item": Value(its_own_item, iterable=True), "class": Value(lambda: Ids), "complex": Value(lambda: 3j),
    "index raises": Value(lambda: instance("Broken", __index__=_raises), mine=("integer",)),
    "index lies": Value(lambda: instance("Lying", __index__=lambda self: "3")),
    "float raises": Value(lambda: instance("Broken", __float__=_raises), mine=("seconds",)),
    "float lies": Value(lambda: instance("Lying", __float__=lambda self: "3")),
    "float is nan": Value(lambda: instance("Lying", __float__=lambda self: math.nan), real=math.nan),
    "repr raises": Value(lambda: instance("Broken", __repr__=_raises)),
    "repr is long": Value(lambda: instance("Long", __repr__=lambda self: "x" * 10_000_000)),
    "repr is no text": Value(lambda: instance("Lying", __repr__=lambda self: Text("x"))),
    "name is long": Value(lambda: instance("x" * 10_000_000, __repr__=_raises)),
    "name raises": Value(lambda: instance("Broken", meta=Nameless, __repr__=_raises)),
    "class is bool": Value(lambda: pretending(bool)), "class is int": Value(lambda: pretending(int)),
    "class is str": Value(lambda: pretending(str)), "class is type": Value(lambda: pretending(type)),
    "hash raises": Value(lambda: instance("Broken", __hash__=_raises)),
    "eq raises": Value(lambda: instance("Broken", __eq__=_raises)),
    "bool raises": Value(lambda: instance("Broken", __bool__=_raises)),
    "len raises": Value(lambda: instance("Broken", __len__=_raises)),
    "str raises": Value(lambda: instance("Broken", __str__=_raises)),
    "any attribute": Value(lambda: instance("Any", __getattr__=lambda self, name: self)),
    "no attribute": Value(lambda: instance("None", __getattribute__=_raises), mine=("dataset",)),
    "class is unhashable": Value(lambda: instance("Broken", meta=Unhashable)),
    "module is odd": Value(lambda: instance("bool", __module__=instance("Broken", __eq__=_raises))),
    "iter raises": Value(lambda: instance("Broken", __iter__=_raises), iterable=True),
}


# ---- rules: what an argument makes of a value. None: it is taken; else the error, and how its message goes on ----

def count(least, most=math.inf):
    def rule(value, given):
        if "integer" in value.mine:
            return ZeroDivisionError, "mine"
        if value.integer is None:
            return TypeError, "{} must be an integer, got "
        if value.integer < least:
            return ValueError, f"{{}} must be >{'=' * (least == 0)} 0, got "
        return (ValueError, r"num_workers \* items_in_parallel must be <= 65536") if value.integer > most else None
    return rule


def uint64(value, given):
    if "integer" in value.mine:
        return ZeroDivisionError, "mine"
    if value.integer is None:
        return TypeError, "{} must be an integer, got "
    return None if 0 <= value.integer < 2**64 else (ValueError, r"{} must be >= 0 and < 2\*\*64, got ")


def flag(value, given):
    return None if type(given) is bool or type(given) is np.bool_ else (TypeError, "{} must be True or False, got ")


def seconds(value, given):
    if "seconds" in value.mine:
        return ZeroDivisionError, "mine"
    if value.real is None:
        return TypeError, "{} must be a number of seconds, got "
    return None if 0 <= value.real < math.inf else (ValueError, "{} must be >= 0 and finite, got ")


def called(value, given):
    return None if issubclass(type(given), type) else (TypeError, "{} must be callable")


def collating(value, given):
    return (ValueError, "{} must be callable, None") if type(given) is str else called(value, given)


def iterated(value, given):
    return None if value.iterable else (TypeError, "{} must be an iterable of ")


def text(value, given):
    return None if type(given) is str else (TypeError, "{} must be a str, got ")


def a_class(value, given):
    return None if issubclass(type(given), type) else (TypeError, "{} must be a class")


def method_name(value, given):
    return (ValueError if type(given) is str else TypeError), "{} must be "


def never(value, given):
    return TypeError, "{} must be "


def optional(rule):
    return lambda value, given: None if given is None else rule(value, given)


def no_dataset(value, given):
    return (ZeroDivisionError, "mine") if "dataset" in value.mine else never(value, given)


THREADS = 65_536
LOADER = {
    "dataset": no_dataset, "batch_size": optional(count(1)), "prefetch_depth": count(1), "shuffle": flag,
    "sampler": optional(iterated), "num_workers": count(0, THREADS), "collate_fn": optional(collating),
    "drop_last": flag, "seed": optional(uint64), "items_in_parallel": count(1, THREADS),
    "batch_sampler": optional(iterated), "timeout": seconds, "in_order": flag, "across_epochs": flag,
    "defer_refcount": flag, "adaptive": flag, "generator": optional(never), "prefetch_factor": optional(count(1)),
    "persistent_workers": flag, "multiprocessing_context": optional(method_name), "pin_memory": flag,
    "pin_memory_device": text, "serial_dataset": optional(flag), "worker_init_fn": optional(called),
    "worker_exit_fn": optional(called), "rng_seed": optional(uint64),
}
BESIDE = {"seed": {"shuffle": True}, "timeout": {"num_workers": 1}}


def make_loader(name):
    def call(given):
        return PyDataloader(**{"dataset": Ids(3), **BESIDE.get(name, {}), name: given})
    return call


def ask_rng(given):
    """Ask for the generator with this offset, where three samples are asked for."""
    class Many(Ids):
        def __getitems__(self, indices):
            rng_of_sample(given)
            return indices

    next(iter(PyDataloader(Many(3), 3)))


def offset(value, given):
    if "integer" in value.mine:
        return ZeroDivisionError, "mine"
    if given is None:
        return TypeError, "{} must be given"
    if value.integer is None:
        return TypeError, "{} must be an integer, got "
    return None if 0 <= value.integer < 3 else (ValueError, "{} must be >= 0 and < 3")


def source_with_index(value, given):
    if "dataset" in value.mine:
        return ZeroDivisionError, "mine"
    sized = type(given) in (bytes, str, list, dict, np.ndarray)
    return None if sized else (TypeError, "{} must have __len__ and __getitem__, got ")


def source_to_iterate(value, given):
    if "dataset" in value.mine:
        return ZeroDivisionError, "mine"
    return None if value.iterable else (TypeError, "{} must be iterable, got ")


def taken(value, given):
    return None


class Scrap:
    """A class whose rule may be anything."""


# Each argument of what is public: its rule, and a call with a value for it.
ARGUMENTS = {
    **{f"PyDataloader.{name}": (rule, make_loader(name)) for name, rule in LOADER.items()},
    "PyDataloader.set_epoch.epoch": (uint64, lambda given: PyDataloader(Ids(3)).set_epoch(given)),
    "PyDataset.of.source": (source_with_index, PyDataset.of),
    "PyIterableDataset.of.source": (source_to_iterate, PyIterableDataset.of),
    "register_collate.type": (a_class, lambda given: register_collate(given, len)),
    "register_collate.fn": (called, lambda given: register_collate(Scrap, given)),
    "sample_rng.offset": (offset, ask_rng),
    "share.obj": (taken, share),
    "share.immortal": (flag, lambda given: share([], immortal=given)),
    "limit_buffers.num_bytes": (count(0), collate.limit_buffers),
}
# Those that take no value that could be wrong, or that have a test of their own here.
ELSEWHERE = {"default_collate.samples", "BatchTimeoutError", "WorkerInfo", "PyDataloaderIter"}


@pytest.fixture
def rules():
    """What is registered in a test is forgotten after it, and so is a limit of buffers."""
    before, limit = dict(collate._rules), collate.buffer_usage()["limit"]
    yield
    collate._rules.clear()
    collate._rules.update(before)
    collate.limit_buffers(limit)


def test_every_argument_of_every_public_callable_is_in_the_table():
    """A new one without an entry fails here."""
    found = set()
    for name in dataloader_rs.__all__:
        public = getattr(dataloader_rs, name)
        if name in ELSEWHERE or name == "PyDatasetBase":
            continue
        found |= {f"{name}.{argument}" for argument in inspect.signature(public).parameters}
        if isinstance(public, type):
            for method, function in vars(public).items():
                if not method.startswith("_") and isinstance(function, (types.FunctionType, staticmethod)):
                    found |= {f"{name}.{method}.{argument}" for argument in inspect.signature(function).parameters
                              if argument != "self"}
    assert found - {f"PyDataset.{name}" for name in ("args", "kwargs")} - {
        f"PyIterableDataset.{name}" for name in ("args", "kwargs")} - ELSEWHERE <= set(ARGUMENTS)


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_each_value_comes_to_what_the_table_says(argument, rules):
    """The error has the argument, the rule and the value, and is short; else the value is taken, and nothing wraps."""
    rule, call = ARGUMENTS[argument]
    wrong = []
    for name, value in VALUES.items():
        given = value.make()
        expected = rule(value, given)
        try:
            result = call(given)
        except BaseException as error:
            message = str(error)
            if expected is None or type(error) is not expected[0] or len(message) > LONGEST_MESSAGE or not re.match(
                    expected[1].format(re.escape(argument.rpartition(".")[2])), message):
                wrong.append((name, expected, type(error).__name__, message[:200]))
        else:
            if expected is not None:
                wrong.append((name, expected, "no error"))
            elif type(result) is PyDataloader and value.integer is not None and not value.iterable:
                kept = getattr(result, argument.rpartition(".")[2])
                if kept != (value.integer if type(given) is int else type(kept)(value.integer)):
                    wrong.append((name, "read back", kept))
    assert not wrong


@pytest.mark.parametrize("name", ["repr raises", "repr is long", "repr is no text", "name is long", "name raises",
                                  "class is bool", "no attribute"])
@pytest.mark.parametrize("place", ["sampler", "late sampler", "batch", "batch_sampler", "repr", "collate"])
def test_message_about_a_value_does_not_fail(name, place, num_workers):
    """Wherever a value is put into a message, the message is short and the error the right one."""
    value = VALUES[name].make()
    late = itertools.chain(itertools.repeat(0, 65_536), [value])
    options = {"sampler": {"sampler": [0, value]}, "late sampler": {"sampler": late, "batch_size": 65_536},
               "batch": {"batch_sampler": [[0], [0, value]]}, "batch_sampler": {"batch_sampler": [[0], value]}}
    if place == "repr":
        class Dataset(Ids, metaclass=Nameless):
            __repr__ = _raises

        assert len(repr(PyDataloader(Dataset(3), sampler=[value], num_workers=num_workers))) < LONGEST_MESSAGE
        return
    if place == "collate":
        loader = PyDataloader(Calls(2, lambda index: {"key": value}), 2, collate_fn=default_collate,
                              num_workers=num_workers)
        expected = "no rule for"
    else:
        loader = PyDataloader(Ids(3), num_workers=num_workers, **options[place])
        expected = "must yield"
    with pytest.raises(TypeError, match=expected) as caught:
        drain = iter(loader)
        while True:
            next(drain)
    assert len(str(caught.value)) < LONGEST_MESSAGE


def test_key_of_a_sample_does_not_break_the_message():
    """Nor does what a mapping is keyed by."""
    for key in (VALUES[name].make() for name in ("repr raises", "repr is long", "repr is no text", "name is long")):
        with pytest.raises(TypeError, match="no rule for NoneType") as caught:
            default_collate([{key: None}])
        assert len(str(caught.value)) < LONGEST_MESSAGE


def test_note_that_cannot_be_added_does_not_hide_the_error(rules):
    """What a registered function raises comes out, whatever its ``__notes__`` are."""
    class Odd(ValueError):
        __notes__ = 5

    def refuse(samples):
        raise Odd("mine")

    register_collate(Scrap, refuse)
    try:
        default_collate([Scrap()])
    except Odd as error:
        assert error.args == ("mine",)
    else:
        pytest.fail("no error")


def test_array_larger_than_memory_is_a_memory_error():
    """Also where its size fits no integer of C."""
    for size, copies in ((2**45, 1), (2**60, 4)):
        with pytest.raises(MemoryError, match=f"no memory for an array of {4 * size * copies} bytes"):
            default_collate([np.broadcast_to(np.float32(1), size)] * copies)


def test_sample_that_holds_itself_is_a_recursion_error(num_workers):
    """A sample without an end cannot be collated."""
    loader = PyDataloader(Calls(1, lambda index: its_own_item()), collate_fn=default_collate, num_workers=num_workers)
    with pytest.raises(RecursionError):
        next(iter(loader))


@pytest.mark.parametrize(("drawn", "error"), [(-1, ValueError), (2**64, ValueError), (1.5, TypeError), ("3", TypeError),
                                              (None, TypeError), (True, TypeError)])
def test_generator_that_draws_no_such_number_is_an_error(drawn, error):
    """A subclass of a generator may draw anything; the number is neither wrapped nor cut."""
    class Lying(random.Random):
        def getrandbits(self, bits):
            return drawn

    loader = PyDataloader(Ids(3), shuffle=True, generator=Lying())
    with pytest.raises(error, match="^what generator draws must be .*got "):
        iter(loader)


def test_timeout_is_asked_for_once():
    """What was checked is what is used."""
    answers = iter([1.0, math.nan])
    loader = PyDataloader(Ids(3), num_workers=1, timeout=instance("Fickle", __float__=lambda self: next(answers)))
    assert loader.timeout == 1.0
    assert list(loader) == [[0], [1], [2]]


@pytest.mark.parametrize("name", LOADER)
def test_argument_cannot_be_deleted(name):
    """As it cannot be set; the loader goes on."""
    loader = PyDataloader(Ids(2))
    with pytest.raises(AttributeError, match=f"{name} .*cannot be deleted"):
        delattr(loader, name)
    assert list(loader) == [[0], [1]]


# ---- datasets ----

@pytest.mark.parametrize("said", [0, 1, 2, 5])
def test_length_that_lies_decides_the_epoch(said, num_workers):
    """Too long, and items that are not there are errors in their place; too short, and the rest is not asked for."""
    class Lying(PyDataset):
        items = "abc"

        def __len__(self):
            return said

        def __getitem__(self, index):
            return self.items[index]

    outcomes = drained(iter(PyDataloader(Lying(), num_workers=num_workers)))
    assert [outcome if type(outcome) is list else type(outcome) for outcome in outcomes] == (
        [["a"], ["b"], ["c"], IndexError, IndexError][:said])


def test_length_that_changes_under_way_changes_the_next_epoch(num_workers):
    """The one that is under way has the length it began with."""
    class Shrinking(Ids):
        def __getitem__(self, index):
            self.length -= 1
            return index

    dataset = Shrinking(8)
    loader = PyDataloader(dataset, 2, num_workers=num_workers)
    assert list(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert list(loader) == []


@pytest.mark.parametrize("batch_size", [None, 1, 2])
@pytest.mark.parametrize("parallel", [1, 2])
def test_sample_may_be_anything(batch_size, parallel, num_workers):
    """None, exceptions and their classes, the loader, its iterator: each comes as the object that it is."""
    samples = [None, NotImplemented, Ellipsis, StopIteration, StopIteration(), ValueError("fine"), KeyboardInterrupt,
               SystemExit(), its_own_item(), VALUES["eq raises"].make(), VALUES["no attribute"].make()]
    loader = PyDataloader(Calls(len(samples) + 2, lambda index: samples[index]), batch_size, num_workers=num_workers,
                          items_in_parallel=parallel)
    samples += [loader, None]
    batches = iter(loader)
    samples[-1] = batches
    arrived = list(batches) if batch_size is None else list(itertools.chain(*batches))
    assert list(map(id, arrived)) == list(map(id, samples))
    samples.clear()


@pytest.mark.parametrize("act", ["close", "iterate", "next", "delete"])
def test_item_that_meddles_with_its_own_loader_is_an_error_or_works(act):
    """On a worker: no hang, no lost batch; the error is that item's own."""
    held, is_held = {}, threading.Event()

    def item(index):
        if index == 1 and held["armed"]:
            assert is_held.wait(PATIENCE)
            if act == "close":
                held["loader"].close()
            elif act == "iterate":
                iter(held["loader"])
            elif act == "next":
                next(held["batches"])
            else:
                held.pop("loader", None)
        return index

    held["armed"] = True
    loader = PyDataloader(Calls(4, item), num_workers=2)
    held["loader"] = loader
    held["batches"] = batches = iter(loader)
    is_held.set()
    if act == "delete":
        del loader
    outcomes = drained(batches)
    assert [type(outcome) for outcome in outcomes] == [list, list if act == "delete" else RuntimeError, list, list]
    held.clear()
    outcomes.clear()


def test_finalizer_of_a_sample_may_raise_or_use_loaders(num_workers, monkeypatch):
    """What ``__del__`` raises goes to `sys.unraisablehook`; loaders may be iterated and dropped there."""
    unraisable, nested, held = [], [], {}
    monkeypatch.setattr(sys, "unraisablehook", lambda hook: unraisable.append(type(hook.exc_value)))

    class Sample:
        def __del__(self):
            held.pop("loader", None)
            nested.append(list(PyDataloader(Ids(2), num_workers=num_workers)))
            raise ZeroDivisionError("mine")

    held["loader"] = PyDataloader(Calls(3, lambda index: Sample()), num_workers=num_workers, collate_fn=len)
    assert list(held["loader"]) == [1, 1, 1]
    held.clear()
    assert unraisable == [ZeroDivisionError] * 3
    assert nested == [[[0], [1]]] * 3


@pytest.mark.parametrize("result", [StopIteration(), ValueError, None, NotImplemented, ()])
def test_collate_fn_may_return_anything(result, num_workers):
    """An exception that is returned is no error, and None is no end."""
    arrived = list(PyDataloader(Ids(2), num_workers=num_workers, collate_fn=lambda samples: result))
    assert arrived[0] is arrived[1] is result


# ---- samplers ----

@pytest.mark.parametrize("length", [3, 70_000])
@pytest.mark.parametrize("size", [1, 7])
def test_sampler_with_a_length_and_without_an_end_goes_on(length, size, num_workers):
    """It is not read until the memory is full, but as far as its length says, or 65,536, and then as it is needed."""
    drawn = itertools.count()

    class Endless:
        def __len__(self):
            return length

        def __iter__(self):
            return (index % 5 for index in drawn)

    batches = iter(PyDataloader(Ids(5), size, sampler=Endless(), num_workers=num_workers))
    assert next(drawn) == max(length + 1, 65_536)
    with pytest.raises(TypeError, match="not known"):
        len(batches)
    assert list(itertools.islice(itertools.chain.from_iterable(batches), 14)) == [index % 5 for index in range(14)]


def test_batch_sampler_that_yields_itself_is_an_error(num_workers):
    """A sampler is no index, also where it is a batch."""
    class Circular:
        def __init__(self):
            self.given = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.given += 1
            if self.given > 10:
                raise StopIteration
            return self

    with pytest.raises(TypeError, match="^batch_sampler must yield integers, got "):
        next(iter(PyDataloader(Ids(3), batch_sampler=Circular(), num_workers=num_workers)))


@pytest.mark.parametrize(("batch", "error"), [
    ([], None), ((), None), (iter([1, 2]), None), (range(3), None), (np.array([2, 0]), None), ({1: "x"}, None),
    ([2**64], None), ([[0]], TypeError), ("01", TypeError), ([0.0], TypeError), ([None], TypeError), ([-1], ValueError),
    (5, TypeError), (None, TypeError)], ids=without_address)
def test_batch_of_any_kind_is_taken_or_named(batch, error, num_workers):
    """Batches before it come; then it does, or its error, which ends the epoch."""
    expected = None if error else [int(index) for index in list(batch)]
    batch = iter(expected) if inspect.isgenerator(batch) or hasattr(batch, "__next__") else batch
    outcomes = drained(iter(PyDataloader(Ids(3), batch_sampler=[[1], batch, [2]], num_workers=num_workers)))
    assert outcomes[0] == [1]
    if error is None:
        assert outcomes[1:] == [expected, [2]]
    else:
        assert [type(outcome) for outcome in outcomes[1:]] == [error]


# ---- streams ----

class Reads(PyIterableDataset):
    def __init__(self, read, shards=None, length=None):
        self.read = read
        if shards is not None:
            self.shards_of = shards

    def __iter__(self):
        return self.read()

    def shards(self, num_shards):
        return self.shards_of(num_shards)


class Unsharded(Reads):
    shards = None


@pytest.mark.parametrize(("shards", "got"), [
    (lambda count: [], "0"), (lambda count: [[0]], "1"), (lambda count: [[0]] * 5, "5"),
    (lambda count: itertools.repeat([0]), "at least 1004")], ids=["none", "one", "five", "endless"])
def test_other_number_of_shards_is_an_error(shards, got):
    """Also one without an end, which is not read to it."""
    with pytest.raises(ValueError, match=rf"shards\(2\) must return 2 iterables, got {got}$"):
        iter(PyDataloader(Reads(lambda: iter([]), shards), num_workers=2))


@pytest.mark.parametrize("what", [None, 5, [[1]], "iter of a non-iterable"], ids=repr)
def test_shards_that_are_none_are_pythons_own_error(what):
    """The loader is usable afterwards."""
    loader = PyDataloader(Reads(lambda: iter([]), lambda count: [5, 5] if type(what) is str else what), num_workers=2)
    for _ in range(2):
        with pytest.raises((TypeError, ValueError)):
            iter(loader)


def test_stream_whose_iterator_is_none_is_a_type_error(num_workers):
    """``iter()`` says so."""
    with pytest.raises(TypeError, match="iter"):
        iter(PyDataloader(Unsharded(lambda: [1, 2]), num_workers=num_workers))


def test_stream_that_asks_for_its_own_batches_is_an_error(num_workers):
    """The RuntimeError takes the place of its batch, and the epoch ends there."""
    held = {}

    def read():
        yield 0
        next(held["batches"])

    held["batches"] = iter(PyDataloader(Unsharded(read), num_workers=num_workers))
    outcomes = drained(held["batches"])
    assert outcomes[0] == [0]
    assert [type(outcome) for outcome in outcomes[1:]] == [RuntimeError]
    held.clear()


@pytest.mark.parametrize("sample", [None, StopIteration(), GeneratorExit, NotImplemented])
def test_stream_may_give_anything(sample, num_workers):
    """An exception is a sample like others, and None is no end."""
    assert list(PyDataloader(Unsharded(lambda: iter([sample] * 3)), None, num_workers=num_workers)) == [sample] * 3


# ---- what is behind the public names ----

PRIVATE = """
import array, itertools, sys
from dataloader_rs import _buffers, _core, _share, _shuffle
from toy_datasets import Ids

VALUES = [0, 1, 2, -1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 1.5, float("nan"), True, None, "3", b"3", [],
          [0, 1], range(2), object(), Ids, array.array("q", [0, 1]), lambda *anything: None]

def recipe(**changes):
    fields = dict(dataset=Ids(5), fetch_many=None, collate_fn=None, batch_size=2, num_workers=1, prefetch_depth=2,
                  items_in_parallel=1, defer_refcount=False, rng_seed=0, batched=True, drop_last=False, in_order=True,
                  timeout=0.05)
    fields.update(changes)
    return _core.Recipe(**fields)

FIELDS = ["dataset", "fetch_many", "collate_fn", "batch_size", "num_workers", "prefetch_depth", "items_in_parallel",
          "defer_refcount", "rng_seed", "batched", "drop_last", "in_order", "timeout"]

log = open(sys.argv[1], "w")

def attempt(label, call):
    log.seek(0)
    log.write(label.ljust(200))
    log.flush()
    try:
        return call()
    except Exception:
        return None

def consume(iterator):
    for _ in range(4):
        try:
            next(iterator)
        except StopIteration:
            break
        except Exception:
            pass

def run(made, source=range(5), num_items=5, stream=None, number=0, after=None, pool=None):
    if pool is None:
        pool = _core.WorkerPool(made.num_threads, 1 << 20, True, None)
    consume(_core.start_epoch(made, pool, source, num_items, stream, number, after))

for field, value in itertools.product(FIELDS, VALUES):
    made = attempt(f"Recipe {field}={value!r}", lambda: recipe(**{field: value}))
    if made is not None and made.num_threads < 9:
        attempt(f"epoch of Recipe {field}={value!r}", lambda: run(made))
        pool = _core.WorkerPool(made.num_threads, 1 << 20, True, None)
        attempt(f"stream of Recipe {field}={value!r}",
                lambda: consume(_core.start_stream(made, pool, [iter([0, 1, 2])], 3, len, 0)))
for value in VALUES:
    if value not in (2**31, 2**32):
        attempt(f"WorkerPool {value!r}", lambda: _core.WorkerPool(value, 1 << 20, True, None))
    attempt(f"stack {value!r}", lambda: _core.WorkerPool(1, value, True, None).check_started())
    attempt(f"crew {value!r}", lambda: run(recipe(), pool=_core.WorkerPool(1, 1 << 20, True, value)))
    for name in ("source", "num_items", "number", "after"):
        attempt(f"start_epoch {name}={value!r}", lambda: run(recipe(), **{name: value}))
    attempt(f"source and num_items {value!r}", lambda: run(recipe(), source=value, num_items=2))
    pool = _core.WorkerPool(1, 1 << 20, True, None)
    for readers, items, on_end in ((value, 3, len), ([value], 3, len), ([iter([1])], value, len), ([], None, len),
                                   ([iter([1])], 1, value)):
        attempt(f"start_stream {readers!r} {items!r}",
                lambda: consume(_core.start_stream(recipe(), pool, readers, items, on_end, 0)))
    for numbers in ((value, 0, 0), (5, value, 0), (5, 0, value)):
        order = attempt(f"ShuffledOrder {numbers!r}", lambda: _shuffle.ShuffledOrder(*numbers))
        if order is not None and numbers[0] is value:
            for key in VALUES + [slice(0, 3), slice(-5, 5, 2)]:
                if key != slice(0, 3) or len(order) < 2**20:
                    attempt(f"order[{key!r}]", lambda: order[key])
                attempt(f"order.find({key!r})", lambda: order.find(key))
    if value not in (2**31, 2**32):
        attempt(f"Buffer {value!r}", lambda: bytes(memoryview(_buffers.Buffer(value))[:1]))
    for function in (_share.is_immortal, _share.is_instance, _share.defer, _buffers.set_limit):
        attempt(f"{function} {value!r}", lambda: function(value))
    for arguments in ((value, [b"x"], 1), (bytearray(1), value, 1), (bytearray(1), [value], 1),
                      (bytearray(2), [b"x", b"yy"], value)):
        attempt(f"copy_rows{arguments!r}", lambda: _buffers.copy_rows(*arguments))

# Epochs that follow one that cannot be followed.
ours, pool = recipe(), _core.WorkerPool(1, 1 << 20, True, None)
first = _core.start_epoch(ours, pool, range(5), 5, None, 0)
second = _core.start_epoch(ours, pool, range(5), 5, None, 1, first)
serial = recipe(num_workers=0)
others = [(ours, pool, first), (ours, _core.WorkerPool(1, 1 << 20, True, None), second), (recipe(), pool, second),
          (serial, _core.WorkerPool(0, 1 << 20, True, None), second)]
list(first)
for recipe_of, pool_of, after in [*others, (ours, pool, first)]:
    try:
        _core.start_epoch(recipe_of, pool_of, range(5), 5, None, 2, after)
    except ValueError:
        continue
    sys.exit("an epoch was started after one that it cannot follow")
blank = _core.PyDataloaderIter.__new__(_core.PyDataloaderIter)
assert list(blank) == [] and len(blank) == 0
attempt("the end", lambda: None)
log.close()
"""


def test_no_value_crashes_what_is_behind_the_public_names(run_script, tmp_path):
    """Whatever is passed to the extension's own classes and functions: an exception or a result, never a crash.

    The script writes down what it is about to do, so that a crash says which pair it was.
    """
    log = tmp_path / "pair"
    finished = run_script(PRIVATE, str(log), timeout=60, status=None, stderr=None)
    last = log.read_text().strip() if log.exists() else ""
    assert (last, finished.returncode) == ("the end", 0), finished.stderr[-2000:]


def test_threads_that_pass_bad_values_at_once_get_their_own_errors():
    """Checks keep nothing between calls."""
    def attempt(number):
        with pytest.raises(ValueError, match=f"^batch_size must be > 0, got -{number}$"):
            PyDataloader(Ids(1), batch_size=-number)

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
