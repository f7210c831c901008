"""Every argument: its error and its message, reading it back, and a loader as an object that frameworks handle."""

import contextlib
import copy
import functools
import gc
import inspect
import pickle
import weakref

import numpy as np
import pytest
from conftest import eventually, worker_threads
from toy_datasets import Ids

import dataloader_rs
from dataloader_rs import BatchTimeoutError, PyDataloader, PyDataloaderIter, PyDataset, PyIterableDataset
from dataloader_rs.serial import serial_proxy_of

COUNTS = {"batch_size": "> 0", "prefetch_depth": "> 0", "num_workers": ">= 0", "items_in_parallel": "> 0",
          "prefetch_factor": "> 0"}
FLAGS = ["shuffle", "drop_last", "defer_refcount", "adaptive", "in_order", "across_epochs", "persistent_workers",
         "pin_memory", "serial_dataset"]
# Those for which None means something, or that the argument was not given.
OPTIONAL = ["batch_size", "prefetch_factor", "serial_dataset"]
KEYWORDS = {
    "batch_sampler": None,
    "timeout": 0,
    "in_order": True,
    "across_epochs": False,
    "defer_refcount": True,
    "adaptive": True,
    "generator": None,
    "prefetch_factor": None,
    "persistent_workers": False,
    "multiprocessing_context": None,
    "pin_memory": False,
    "pin_memory_device": "",
    "serial_dataset": None,
    "worker_init_fn": None,
    "worker_exit_fn": None,
    "rng_seed": None,
}
POSITIONAL = {
    "batch_size": 1, "prefetch_depth": 2, "shuffle": False, "sampler": None, "num_workers": 0, "collate_fn": None,
    "drop_last": False, "seed": None, "items_in_parallel": 1,
}
# Decimal text of it is an error in Python itself.
ENORMOUS = 10**5000


class Index:
    """A number as other libraries make them: not an int, but good as an index."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no repr")


class BrokenIndex:
    def __index__(self):
        raise ZeroDivisionError("no index")


class Extended(PyDataloader):
    """As trainers subclass a loader: another signature, another iteration."""

    def __init__(self, ds, extra, **kw):
        self.before = "set before the base class knows anything"
        super().__init__(ds, **kw)
        self.extra = extra

    def __iter__(self):
        for batch in super().__iter__():
            yield batch, self.extra


class Forgetful(PyDataset):
    """Has an ``__init__`` that does not call the base class's."""

    def __init__(self):
        self.items = "abc"

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def last(samples):
    return samples[-1]


# ---- counts ----

@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [True, False, 2.0, float("nan"), "2", b"2", None, [2], 2j, np.float64(2), np.True_,
                                   np.array([2])], ids=repr)
def test_count_of_a_wrong_type_is_a_type_error(name, value):
    """A count that is no integer, a bool or a float among them, is a TypeError with its name, the rule, the value."""
    if value is None and name in OPTIONAL:
        assert getattr(PyDataloader(Ids(5), **{name: value}), name) is None
        return
    with pytest.raises(TypeError) as caught:
        PyDataloader(Ids(5), **{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name} must be an integer, got {value!r}")


@pytest.mark.parametrize(("name", "rule"), COUNTS.items())
@pytest.mark.parametrize("make", [int, np.int64, Index], ids=["int", "numpy", "index"])
def test_count_out_of_range_is_a_value_error(name, rule, make):
    """A count below its least value is a ValueError with its name, the rule and the value."""
    for value in [-1, -7] + [0] * (rule == "> 0"):
        with pytest.raises(ValueError) as caught:
            PyDataloader(Ids(5), **{name: make(value)})
        assert str(caught.value) == f"{name} must be {rule}, got {value}"


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("make", [np.int8, np.uint8, np.int64, np.uint64, np.array, Index])
def test_count_as_any_integer_is_accepted(name, make):
    """NumPy integers, and whatever else has ``__index__``, are counts; they are read back as plain ints."""
    loader = PyDataloader(Ids(5), **{name: make(3)})
    value = getattr(loader, name)
    assert value == 3
    assert type(value) is int
    assert sum(list(loader), []) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["batch_size", "prefetch_depth"])
@pytest.mark.parametrize("value", [10**10, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, ENORMOUS],
                         ids=["10**10", "2**31", "2**32", "2**63-1", "2**63", "2**64-1", "2**64", "10**30", "enormous"])
@pytest.mark.parametrize("workers", [0, 2])
def test_huge_count_costs_nothing(name, value, workers):
    """A huge batch_size or prefetch_depth means "all of it": nothing of that size is allocated, no sum wraps."""
    loader = PyDataloader(Ids(50), **{"batch_size": 7, "num_workers": workers, name: value})
    assert getattr(loader, name) == value
    assert len(loader) == (1 if name == "batch_size" else 8)
    iterator = iter(loader)
    assert len(iterator) == len(loader)
    assert sum(iterator, []) == list(range(50))


def test_huge_batch_size_with_drop_last_gives_no_batch():
    """No batch is as large as batch_size, so drop_last leaves none."""
    for size in (51, 10**10, 2**64, ENORMOUS):
        loader = PyDataloader(Ids(50), size, drop_last=True)
        assert len(loader) == 0
        assert list(loader) == []


@pytest.mark.parametrize("counts", [{"num_workers": 65_537}, {"items_in_parallel": 65_537}, {"num_workers": ENORMOUS},
                                    {"items_in_parallel": 2**64}, {"num_workers": 2**32, "items_in_parallel": 2**32},
                                    {"num_workers": 257, "items_in_parallel": 256}],
                         ids=["workers", "items", "enormous", "2**64", "product", "just"])
def test_more_threads_than_any_machine_has_is_a_value_error(counts):
    """Thread numbers that cannot be meant are refused in the constructor, not by the system later."""
    rule = r"num_workers \* items_in_parallel must be <= 65536 threads, got .* \* "
    with pytest.raises(ValueError, match=rule) as caught:
        PyDataloader(Ids(5), **counts)
    for value in counts.values():
        assert value == ENORMOUS or str(value) in str(caught.value)


def test_constructing_starts_no_thread():
    """Threads start at the first ``iter()``, so as many as are allowed cost nothing before it."""
    before = worker_threads()
    loaders = [PyDataloader(Ids(5), num_workers=65_536), PyDataloader(Ids(5), num_workers=256, items_in_parallel=256)]
    assert eventually(lambda: worker_threads() <= before)
    del loaders


@pytest.mark.parametrize("name", [*COUNTS, "seed"])
def test_index_method_that_raises_comes_out_of_the_constructor(name):
    """A ``__index__`` that fails is the user's own error, and shown as it is."""
    with pytest.raises(ZeroDivisionError, match="no index"):
        PyDataloader(Ids(5), shuffle=True, **{name: BrokenIndex()})


@pytest.mark.parametrize("name", [*COUNTS, *FLAGS, "seed", "sampler", "collate_fn", "dataset"])
def test_value_whose_repr_raises_still_gets_the_right_message(name):
    """The message of a wrong argument does not depend on the value's ``__repr__``; it names the type instead."""
    with pytest.raises(TypeError, match=rf"^{name} must be .*Unprintable"):
        PyDataloader(**{"dataset": Ids(5), name: Unprintable()})


@pytest.mark.parametrize(("name", "rule"), [*COUNTS.items(), ("seed", ">= 0 and < 2**64")])
def test_number_too_long_to_print_still_gets_the_right_message(name, rule):
    """Python refuses to write 5,000 digits; the message keeps name and rule and stays short."""
    with pytest.raises(ValueError) as caught:
        PyDataloader(Ids(5), shuffle=True, **{name: -ENORMOUS})
    assert str(caught.value).startswith(f"{name} must be {rule}, got ")
    assert len(str(caught.value)) < 200


# ---- flags ----

@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [0, 1, 1.0, "yes", None, [True], np.int64(1), np.array([True])], ids=repr)
def test_flag_of_a_wrong_type_is_a_type_error(name, value):
    """A flag is True or False and nothing that only counts as one."""
    if value is None and name in OPTIONAL:
        assert getattr(PyDataloader(Ids(5), **{name: value}), name) is None
        return
    with pytest.raises(TypeError) as caught:
        PyDataloader(Ids(5), **{name: value})
    assert str(caught.value).startswith(f"{name} must be True or False, got {value!r}")


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [True, False, np.True_, np.False_], ids=repr)
def test_flag_may_be_a_numpy_bool(name, value):
    """Comparing NumPy numbers gives NumPy's bool, which is a flag too; it is read back as Python's."""
    assert getattr(PyDataloader(Ids(5), **{name: value}), name) is bool(value)


# ---- seed ----

@pytest.mark.parametrize("value", [True, False, 1.0, "1", b"1", [1], np.float64(1), np.True_], ids=repr)
def test_seed_of_a_wrong_type_is_a_type_error(value):
    """A seed is an integer; a bool or a float is none."""
    with pytest.raises(TypeError) as caught:
        PyDataloader(Ids(5), shuffle=True, seed=value)
    assert str(caught.value).startswith(f"seed must be an integer, got {value!r}")


@pytest.mark.parametrize("value", [-1, 2**64, 2**64 + 1, -2**63, 10**20])
def test_seed_out_of_range_is_a_value_error(value):
    """Seeds are 64 bits without a sign; the message has the rule and the value."""
    with pytest.raises(ValueError) as caught:
        PyDataloader(Ids(5), shuffle=True, seed=value)
    assert str(caught.value) == f"seed must be >= 0 and < 2**64, got {value}"


@pytest.mark.parametrize("value", [0, 1, 2**63, 2**64 - 1, np.uint64(2**64 - 1), np.int8(3), Index(5)])
def test_seed_in_range_is_accepted(value):
    """Every 64-bit number is a seed, however the integer comes; it is read back as a plain int."""
    loader = PyDataloader(Ids(5), shuffle=True, seed=value)
    assert loader.seed == value.__index__()
    assert type(loader.seed) is int
    assert sorted(sum(loader, [])) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("others", [{}, {"shuffle": False}, {"sampler": [0, 1]}])
@pytest.mark.parametrize("seed", [0, 1])
def test_seed_without_shuffle_is_a_value_error(others, seed):
    """A seed that would have no effect is refused, the seed 0 too."""
    with pytest.raises(ValueError, match=rf"seed needs shuffle=True, got seed={seed} with shuffle=False"):
        PyDataloader(Ids(5), seed=seed, **others)


# ---- sampler and collate_fn ----

@pytest.mark.parametrize("value", [5, 0, 1.5, True, object, len], ids=repr)
def test_sampler_that_is_not_iterable_is_a_type_error(value):
    """A sampler is checked in the constructor: the message has its name, the rule and the value."""
    with pytest.raises(TypeError) as caught:
        PyDataloader(Ids(5), sampler=value)
    assert str(caught.value).startswith(f"sampler must be an iterable of indices or None, got {value!r}")


@pytest.mark.parametrize("sampler", [[], [0, 1], range(2)], ids=repr)
def test_sampler_with_shuffle_is_a_value_error(sampler):
    """One of the two gives the order; an empty sampler is a sampler."""
    with pytest.raises(ValueError) as caught:
        PyDataloader(Ids(5), shuffle=True, sampler=sampler)
    assert "mutually exclusive" in str(caught.value)
    assert "shuffle=True" in str(caught.value)
    assert f"sampler={sampler!r}" in str(caught.value)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("value", [5, "stack", False, [len]], ids=repr)
def test_collate_fn_that_cannot_be_called_is_an_error(workers, value):
    """A collate_fn is checked in the constructor, not on a worker; one string stands for a function."""
    with pytest.raises(ValueError if value == "stack" else TypeError) as caught:
        PyDataloader(Ids(5), collate_fn=value, num_workers=workers)
    assert str(caught.value).startswith(f'collate_fn must be callable, None or "torch", got {value!r}')


@pytest.mark.parametrize("collate_fn", [len, list, last, lambda samples: samples,
                                        functools.partial(sorted, reverse=True)])
def test_collate_fn_may_be_anything_that_can_be_called(collate_fn, num_workers):
    """Functions, classes, lambdas and partials all get the list of samples."""
    assert list(PyDataloader(Ids(3), 2, num_workers=num_workers, collate_fn=collate_fn)) == [collate_fn([0, 1]),
                                                                                            collate_fn([2])]


# ---- dataset ----

@pytest.mark.parametrize("value", [[1, 2], range(3), "abc", None, 5, PyDataset, Ids], ids=repr)
def test_dataset_that_is_none_is_a_type_error(value):
    """B55: the message says what to subclass, under both its names, how to wrap, and what was given."""
    with pytest.raises(TypeError) as caught:
        PyDataloader(value)
    message = str(caught.value)
    assert message.startswith("dataset must be a PyDataset (PyDatasetBase), got ")
    assert f"got {type(value).__name__}: " in message
    assert "subclass dataloader_rs.PyDataset" in message
    assert "PyDataset.of(" in message


@pytest.mark.parametrize("value", [iter([1]), {1, 2}, (i for i in [1])], ids=["iterator", "set", "generator"])
def test_what_can_only_be_iterated_is_told_how_to_be_a_stream(value):
    """`PyDataset.of` would refuse it; `PyIterableDataset.of` takes it."""
    with pytest.raises(TypeError, match=r"dataset must be a PyDataset .*wrap the object with PyIterableDataset\.of\("):
        PyDataloader(value)
    assert list(PyDataloader(PyIterableDataset.of(value), 2))


def test_missing_dataset_is_a_type_error():
    """There is no loader without a dataset."""
    with pytest.raises(TypeError, match="dataset"):
        PyDataloader()


def test_both_names_of_the_base_class_are_one():
    """PyDatasetBase is what the older implementation called it."""
    assert dataloader_rs.PyDatasetBase is PyDataset


def test_dataset_that_forgets_the_base_init_works(num_workers):
    """B55: ``super().__init__()`` is customary, not needed."""
    assert list(PyDataloader(Forgetful(), 2, num_workers=num_workers)) == [["a", "b"], ["c"]]


def test_dataset_class_is_generic():
    """``PyDataset[T]``, ``PyDataloader[T, B]`` and ``PyDataloaderIter[B]`` can be written in annotations."""
    class Typed(PyDataset[int]):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return index

    assert list(PyDataloader[int, list[int]](Typed())) == [[0]]
    assert PyDataloaderIter[int].__origin__ is PyDataloaderIter


@pytest.mark.parametrize("missing", ["__len__", "__getitem__"])
def test_dataset_without_a_method_says_which(missing, num_workers):
    """A forgotten ``__len__`` shows at ``iter()``, a forgotten ``__getitem__`` at ``next()``, with class and method."""
    class Incomplete(PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return index

    delattr(Incomplete, missing)
    loader = PyDataloader(Incomplete(), num_workers=num_workers)
    with pytest.raises(NotImplementedError, match=f"Incomplete must implement {missing}"):
        next(iter(loader))


@pytest.mark.parametrize("source", ["abc", [5, 6, 7], (1,), b"xy", range(4), np.arange(3), {0: "a", 1: "b"}, []],
                         ids=repr)
def test_any_sized_indexable_object_can_be_wrapped(source, num_workers):
    """``PyDataset.of(obj)`` has the length and the items of `obj`."""
    dataset = PyDataset.of(source)
    assert isinstance(dataset, PyDataset)
    assert len(dataset) == len(source)
    expected = [source[i] for i in range(len(source))]
    assert [dataset[i] for i in range(len(dataset))] == expected
    assert sum(PyDataloader(dataset, 2, num_workers=num_workers), []) == expected


def test_wrapping_a_dataset_gives_it_back():
    """There is nothing to adapt in a PyDataset."""
    dataset = Ids(3)
    assert PyDataset.of(dataset) is dataset


def test_wrapped_object_is_not_copied():
    """What is appended to a wrapped list is part of the next epoch."""
    source = ["a"]
    loader = PyDataloader(PyDataset.of(source))
    assert list(loader) == [["a"]]
    source.append("b")
    assert list(loader) == [["a"], ["b"]]


@pytest.mark.parametrize(("source", "missing"), [(5, "__len__"), (None, "__len__"), ({1, 2}, "__getitem__"),
                                                 (iter([1]), "__len__"), (object(), "__len__"), (list, "__len__")])
def test_object_that_cannot_be_wrapped_is_a_type_error(source, missing):
    """``PyDataset.of`` names what it needs, what it got and what that lacks."""
    with pytest.raises(TypeError) as caught:
        PyDataset.of(source)
    assert str(caught.value) == (f"source must have __len__ and __getitem__, got {type(source).__name__} "
                                 f"without {missing}")


def test_object_that_answers_every_attribute_is_not_wrapped():
    """Methods are looked up on the type, as Python does: a ``__getattr__`` that answers everything has none."""
    class Answers:
        def __getattr__(self, name):
            return lambda *args: 1

    with pytest.raises(TypeError, match="got Answers without __len__"):
        PyDataset.of(Answers())


# ---- signature, reading back, setting ----

def test_signature_is_the_real_one():
    """B55: names, order, defaults and kinds, as `inspect.signature` shows them."""
    parameters = inspect.signature(PyDataloader).parameters
    assert list(parameters) == ["dataset", *POSITIONAL, *KEYWORDS]
    assert parameters["dataset"].default is inspect.Parameter.empty
    for name, default in POSITIONAL.items():
        assert parameters[name].default is default
        assert parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    for name, default in KEYWORDS.items():
        assert parameters[name].default is default
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY


def test_arguments_may_be_given_by_position():
    """Those that are not by keyword only, in the documented order."""
    dataset = Ids(5)
    given = [dataset, 2, 3, True, None, 1, last, True, 7, 4]
    loader = PyDataloader(*given)
    assert [getattr(loader, name) for name in ["dataset", *POSITIONAL]] == given
    with pytest.raises(TypeError):
        PyDataloader(*given, True)


def test_unknown_argument_is_a_type_error():
    """A misspelt name is not taken in silence."""
    with pytest.raises(TypeError, match="batchsize"):
        PyDataloader(Ids(5), batchsize=2)


def test_defaults_can_be_read_back():
    """B55: every argument is an attribute under its own name."""
    dataset = Ids(5)
    loader = PyDataloader(dataset)
    assert loader.dataset is dataset
    for name, default in (POSITIONAL | KEYWORDS).items():
        if name != "rng_seed":  # it is a number even if none was given
            assert getattr(loader, name) is default


def test_given_objects_are_read_back_themselves():
    """B55: what was passed in, not a copy or a wrapper."""
    sampler = [0, 1]
    dataset = PyDataset.of("ab")
    loader = PyDataloader(dataset, sampler=sampler, collate_fn=last, defer_refcount=False,
                          adaptive=False, worker_init_fn=print, worker_exit_fn=len, rng_seed=2**64 - 1)
    assert loader.dataset is dataset
    assert loader.worker_init_fn is print
    assert loader.worker_exit_fn is len
    assert loader.rng_seed == 2**64 - 1
    assert loader.sampler is sampler
    assert loader.collate_fn is last
    assert loader.defer_refcount is False
    assert loader.adaptive is False


@pytest.mark.parametrize("name", ["dataset", *POSITIONAL, *KEYWORDS])
def test_argument_cannot_be_set_afterwards(name):
    """Setting one would have no effect on running workers, so it is an AttributeError that says what to do."""
    loader = PyDataloader(Ids(5), 2)
    before = getattr(loader, name)
    with pytest.raises(AttributeError, match=rf"^{name} .*cannot be set.*PyDataloader"):
        setattr(loader, name, before)
    assert getattr(loader, name) is before
    assert list(loader) == [[0, 1], [2, 3], [4]]


def test_other_attributes_can_be_set_and_deleted():
    """B55: trainers leave notes on a loader."""
    loader = PyDataloader(Ids(5))
    loader.note = "mine"
    assert loader.note == "mine"
    del loader.note
    assert not hasattr(loader, "note")


def test_subclass_may_set_an_argument_before_the_base_class_does():
    """``self.dataset = dataset`` ahead of ``super().__init__(dataset)`` is common, and harmless."""
    class Early(PyDataloader):
        def __init__(self, dataset):
            self.dataset = dataset
            super().__init__(dataset, 2)

    assert list(Early(Ids(3))) == [[0, 1], [2]]


# ---- repr ----

def test_repr_shows_what_was_given():
    """The class, the dataset's class, and the arguments that are not defaults."""
    assert repr(PyDataloader(Ids(5))) == "PyDataloader(Ids)"
    loader = PyDataloader(Ids(5), 32, shuffle=True, seed=3, num_workers=2, drop_last=True)
    assert repr(loader) == "PyDataloader(Ids, batch_size=32, shuffle=True, num_workers=2, drop_last=True, seed=3)"
    assert repr(Extended(Ids(5), "x", batch_size=2)) == "Extended(Ids, batch_size=2)"


def test_repr_stays_short_and_never_fails():
    """Samplers of a million indices, enormous numbers and reprs that raise are cut or left out."""
    class Failing(Ids):
        def __repr__(self):
            raise RuntimeError("no repr")

    class Sampler(list):
        def __repr__(self):
            raise RuntimeError("no repr")

    for loader in (PyDataloader(Failing(5), sampler=Sampler()), PyDataloader(Ids(5), sampler=list(range(10**6))),
                   PyDataloader(Ids(5), ENORMOUS), PyDataloader(Ids(5), collate_fn=lambda batch: batch)):
        assert repr(loader).startswith("PyDataloader(")
        assert len(repr(loader)) < 300


# ---- subclassing, rebuilding, weak references ----

def test_subclass_with_another_signature_and_iteration_works(num_workers):
    """B55: extra constructor arguments, and an ``__iter__`` that wraps the one of the base class."""
    loader = Extended(Ids(3), "extra", batch_size=2, num_workers=num_workers)
    assert (loader.before[:3], loader.extra, loader.batch_size) == ("set", "extra", 2)
    assert list(loader) == [([0, 1], "extra"), ([2], "extra")]
    assert len(loader) == 2


@pytest.mark.parametrize("options", [{}, {"batch_size": 3, "drop_last": True}, {"sampler": [4, 2, 2], "num_workers": 2},
                                     {"collate_fn": last, "num_workers": 1, "prefetch_depth": 5},
                                     {"items_in_parallel": 2, "defer_refcount": False},
                                     {"num_workers": 1, "worker_init_fn": str, "worker_exit_fn": str, "rng_seed": 4},
                                     {"shuffle": True, "seed": 7, "batch_size": 4}])
def test_loader_rebuilt_from_its_attributes_is_equal(options):
    """B55: what trainers do to replace a sampler; with every argument, and with the seven names of the case."""
    loader = PyDataloader(Ids(8), **options)
    names = list(inspect.signature(PyDataloader).parameters)
    rebuilt = type(loader)(**{name: getattr(loader, name) for name in names})
    assert repr(rebuilt) == repr(loader)
    assert list(rebuilt) == list(loader)
    if "shuffle" not in options:
        seven = ["dataset", "batch_size", "num_workers", "prefetch_depth", "drop_last", "sampler", "collate_fn"]
        assert list(type(loader)(**{name: getattr(loader, name) for name in seven})) == list(loader)


def test_weak_references_to_loader_and_iterator_work(num_workers):
    """B55: both can be referred to weakly, and go away."""
    loader = PyDataloader(Ids(5), num_workers=num_workers, defer_refcount=False)
    iterator = iter(loader)
    next(iterator)
    references = [weakref.ref(loader), weakref.ref(iterator)]
    assert [reference() for reference in references] == [loader, iterator]
    del loader, iterator
    gc.collect()
    assert [reference() for reference in references] == [None, None]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))],
                         ids=["copy", "deepcopy", "pickle"])
@pytest.mark.parametrize("used", [False, True])
def test_duplicate_carries_arguments_and_no_threads(duplicate, used, num_workers):
    """A copy, deep copy or pickle has all arguments and free attributes, counts its own epochs, starts its threads."""
    before = worker_threads()
    loader = Extended(Ids(9), ["extra"], batch_size=2, prefetch_depth=3, shuffle=True, num_workers=num_workers,
                      collate_fn=last, drop_last=True, seed=5, items_in_parallel=2)
    first = list(loader)
    if used:
        iterator = iter(loader)
        next(iterator)
    num_threads = max(num_workers, 1) * 2
    assert eventually(lambda: len(worker_threads() - before) == num_threads)
    other = duplicate(loader)
    assert len(worker_threads() - before) == num_threads
    assert type(other) is Extended
    for name in ["batch_size", "prefetch_depth", "shuffle", "sampler", "num_workers", "collate_fn", "drop_last", "seed",
                 "items_in_parallel", "defer_refcount", "extra", "before"]:
        assert getattr(other, name) == getattr(loader, name)
    assert (other.dataset is loader.dataset) == (duplicate is copy.copy)
    assert other.dataset.length == 9
    assert list(other) == first
    assert eventually(lambda: len(worker_threads() - before) == 2 * num_threads)
    with pytest.raises(AttributeError):
        other.batch_size = 3


def test_duplicate_without_a_seed_has_orders_of_its_own():
    """Without a seed every loader differs, a copy from its original too."""
    loader = PyDataloader(Ids(1000), 1000, shuffle=True)
    assert next(iter(loader)) != next(iter(copy.copy(loader)))


def test_iterator_cannot_be_made_copied_or_pickled():
    """A PyDataloaderIter is made by ``iter(loader)`` alone; each other way is a TypeError that says so."""
    iterator = iter(PyDataloader(Ids(5)))
    assert type(iterator) is PyDataloaderIter
    for attempt in (PyDataloaderIter, lambda: copy.copy(iterator), lambda: pickle.dumps(iterator)):
        with pytest.raises(TypeError, match="iterator over batches|made by iter"):
            attempt()
    assert next(iterator) == [0]


# ---- lengths ----

@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_huge_length_costs_nothing_without_shuffle(workers, drop_last):
    """B19: 2**40 items are counted exactly, and a million million batches are not made ahead."""
    loader = PyDataloader(Ids(1 << 40), 3, num_workers=workers, drop_last=drop_last)
    assert len(loader) == 366503875926 - drop_last
    iterator = iter(loader)
    assert len(iterator) == len(loader)
    assert next(iterator) == [0, 1, 2]
    assert len(iterator) == len(loader) - 1


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_largest_length_is_counted_exactly(shuffle, workers):
    """B19: 2**63 - 1 is the longest a sequence can be, and nothing wraps at it."""
    loader = PyDataloader(Ids(2**63 - 1), 2, num_workers=workers, shuffle=shuffle)
    assert len(loader) == 2**62
    iterator = iter(loader)
    assert len(iterator) == 2**62
    batch = next(iterator)
    assert all(0 <= index < 2**63 - 1 for index in batch)
    assert shuffle or batch == [0, 1]


@pytest.mark.parametrize(("length", "error"), [(1 << 63, OverflowError), (1 << 64, OverflowError), (-1, ValueError),
                                               (2.0, TypeError), ("2", TypeError), (None, TypeError)])
@pytest.mark.parametrize("as_sampler", [False, True])
def test_impossible_length_is_pythons_own_error(length, error, as_sampler, num_workers):
    """B19: what ``len()`` itself raises comes out of ``len(loader)`` and ``iter(loader)``; nothing is wrapped."""
    class Sampler:
        def __len__(self):
            return length

        def __iter__(self):
            return iter([0, 1])

    options = {"sampler": Sampler()} if as_sampler else {}
    loader = PyDataloader(Ids(5 if as_sampler else length), num_workers=num_workers, **options)
    with pytest.raises(error):
        len(loader)
    if as_sampler and error is TypeError:  # a sampler that cannot say how long it is can be iterated all the same
        assert list(iter(loader)) == [[0], [1]]
        return
    with pytest.raises(error):
        iter(loader)


def test_length_may_be_any_integer(num_workers):
    """Datasets count in NumPy integers too, and bools are what Python makes of them."""
    assert list(PyDataloader(Ids(np.int64(2)), num_workers=num_workers)) == [[0], [1]]
    assert list(PyDataloader(Ids(True), num_workers=num_workers)) == [[0]]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("drop_last", [False, True])
def test_number_of_batches_is_exact(size, drop_last):
    """``len(loader)`` is the number of batches that come, with and without drop_last."""
    for length in range(9):
        loader = PyDataloader(Ids(length), size, drop_last=drop_last)
        assert len(loader) == len(list(loader)) == length // size + (not drop_last and length % size != 0)


def test_loader_is_a_context_manager_that_may_be_closed_again(num_workers):
    """``with loader:`` and ``close()`` are there for who wants to wait; a closed loader can still be iterated."""
    loader = PyDataloader(Ids(3), num_workers=num_workers)
    with contextlib.closing(loader), loader as entered:
        assert entered is loader
        assert list(loader) == [[0], [1], [2]]
    loader.close()
    assert list(loader) == [[0], [1], [2]]


class Slotted(PyDataloader):
    __slots__ = ("extra",)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_copy_carries_what_a_subclass_keeps_in_slots(copied):
    """B55: free attributes, wherever they are kept."""
    loader = Slotted(Ids(3), 2)
    loader.extra = "kept"
    twin = copied(loader)
    assert twin.extra == "kept"
    assert list(twin) == [[0, 1], [2]]


class Holder(PyDataset):
    """A dataset that holds its loader, as the one object that a program passes on."""

    def __init__(self):
        self.serial_dataset = True
        self.loader = PyDataloader(self, 2, num_workers=2, timeout=0.2)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index


class Plain:
    """The same, behind an adapter."""

    def __init__(self):
        self.loader = PyDataloader(PyDataset.of(self), 2, num_workers=2)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda obj: pickle.loads(pickle.dumps(obj))],
                         ids=["deepcopy", "pickle"])
def test_duplicate_of_a_dataset_that_holds_its_loader_is_complete(duplicate):
    """The loader is made before its dataset then, and takes over what that one declares all the same."""
    holder = duplicate(Holder())
    assert holder.loader.dataset is holder
    proxy = serial_proxy_of(holder)
    with proxy._lock.here():  # nobody is served meanwhile: it is one at a time
        with pytest.raises(BatchTimeoutError):
            next(iter(holder.loader))
    adapter = duplicate(Plain().loader.dataset)
    assert list(adapter.source.loader) == [[0, 1], [2, 3]]
