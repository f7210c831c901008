"""What type checkers are told is what is there. `make types` runs the checkers; these tests need none of them."""

import copy
import inspect
import pickle
import runpy
import types
import typing
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
from toy_datasets import Ids

import dataloader_rs
from dataloader_rs import PyDataloader, PyDataloaderIter, PyDataset, PyIterableDataset, hints
from dataloader_rs.loader import ARGUMENTS
from dataloader_rs.protocols import LoaderOptions

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dataloader_rs"

T = TypeVar("T")


def parameters_of(function) -> dict[str, Any]:
    return {name: parameter for name, parameter in inspect.signature(function).parameters.items() if name != "self"}


def test_expectations_hold_at_run_time():
    """What the expectations say that a type checker accepts, the loader accepts."""
    pytest.importorskip("numpy")
    runpy.run_path(str(ROOT / "tests/typing/expectations.py"), run_name="__main__")


def test_overloads_have_the_arguments_of_the_loader(monkeypatch):
    """Each overload has all arguments, in order, with the same defaults: the others are in LoaderOptions."""
    real = parameters_of(PyDataloader.__init__)
    monkeypatch.setattr(hints, "overload", typing.overload)  # the one that is used at run time keeps nothing
    read_again = runpy.run_path(PACKAGE / "loader.py", run_name="loader_with_overloads")
    overloads = typing.get_overloads(read_again["PyDataloader"].__init__)
    assert len(overloads) == 7
    for overload in overloads:
        told = parameters_of(overload)
        assert told.pop("options").kind is inspect.Parameter.VAR_KEYWORD
        assert list(told) == [name for name in real if name not in LoaderOptions.__annotations__]
        assert {name: real[name].kind for name in told} == {name: told[name].kind for name in told}
        defaults = {name: parameter.default for name, parameter in told.items()
                    if parameter.default not in (..., inspect.Parameter.empty)}
        assert len(defaults) >= 7
        assert defaults == {name: real[name].default for name in defaults}
    assert set(real) == set(LoaderOptions.__annotations__) | set(told)


def test_arguments_are_attributes_with_types():
    """``loader.batch_size`` and all others are known to type checkers."""
    assert not ARGUMENTS - set(PyDataloader.__annotations__)


def test_annotations_of_the_loader_can_be_evaluated():
    """Libraries that ask for the types of arguments at run time get them, with `object` for what may be anything."""
    told = typing.get_type_hints(PyDataloader.__init__)
    assert set(told) == ARGUMENTS | {"return"}
    assert (told["num_workers"], told["batch_size"], told["generator"]) == (int, int | None, object)


@pytest.mark.parametrize("name", ["PyDataloader.__iter__", "PyDataset.__getitem__", "PyIterableDataset.__iter__",
                                  "WorkerInfo", "default_collate", "get_worker_info", "register_collate", "share"])
def test_annotations_can_be_evaluated(name):
    """The same of what else is public, but for what names libraries that may be missing."""
    assert typing.get_type_hints(attrgetter(name)(dataloader_rs))


def test_generic_classes_take_parameters_at_run_time():
    """``PyDataloader`` takes the type of a sample, and perhaps that of a batch; a subclass has its own parameters."""
    class Pairs(PyDataloader[T, tuple[T, T]], Generic[T]):
        pass

    assert typing.get_args(PyDataloader[int, str]) == (int, str)
    assert typing.get_args(PyDataloader[int]) == typing.get_args(PyDataloader[(int,)]) == (int, Any)
    assert typing.get_args(Pairs[int]) == (int,)
    assert typing.get_origin(Pairs[int]) is Pairs
    assert typing.get_args(PyDataloaderIter[int]) == (int,)
    assert typing.get_args(PyDataset[int]) == typing.get_args(PyIterableDataset[int]) == (int,)
    assert list(PyDataloader[int, list[int]](Ids(1))) == list(PyDataloader[int](Ids(1))) == [[0]]
    for wrong, count in (((int, str, bytes), 3), ((), 0)):
        with pytest.raises(TypeError, match=f"takes one parameter or two, got {count}"):
            PyDataloader[wrong]


class OfNumbers(PyDataset[int]):
    pass


class OfAnything(PyDataset[T]):
    pass


class InTheirOrder(PyDataset[T], Generic[T]):
    pass


class InTheOtherOrder(Generic[T], PyIterableDataset[T]):
    pass


class OfBoth(PyDataset[int], Sequence[int]):
    pass


@pytest.mark.parametrize("kind", [OfAnything, InTheirOrder, InTheOtherOrder])
def test_subclasses_of_datasets_may_be_generic(kind):
    """A generic subclass takes parameters, is called with and without, and may be derived from once more."""
    assert typing.get_origin(kind[int]) is kind and typing.get_args(kind[int]) == (int,)
    assert type(kind[int]()) is type(kind()) is kind
    derived = type("Derived", types.resolve_bases([kind[int]]), {})
    assert issubclass(derived, kind)


@pytest.mark.parametrize("kind", [OfNumbers, OfAnything, InTheirOrder, InTheOtherOrder])
def test_generic_datasets_are_copied(kind):
    """Copies and pickles of instances and of classes with parameters are what they were."""
    assert isinstance(kind(), (PyDataset, PyIterableDataset))
    for duplicate in (copy.copy(kind()), copy.deepcopy(kind()), pickle.loads(pickle.dumps(kind()))):
        assert type(duplicate) is kind
    if kind is not OfNumbers:
        assert pickle.loads(pickle.dumps(kind[int])) == copy.deepcopy(kind[int]) == kind[int]
    loader = pickle.loads(pickle.dumps(PyDataloader[int](Ids(1))))
    assert type(loader) is PyDataloader and list(loader) == [[0]]


def test_datasets_may_have_other_bases():
    """A class may be a dataset and one of Python's own, with parameters for both."""
    assert OfBoth.__mro__.index(PyDataset) < OfBoth.__mro__.index(Sequence)
    assert isinstance(PyDataset.of([1]), PyDataset) and not isinstance([1], PyDataset)


def test_extensions_have_stubs():
    """The package says that it has types, and each extension has a stub."""
    assert (PACKAGE / "py.typed").exists()
    assert {path.stem for path in PACKAGE.glob("*.pyx")} == {path.stem for path in PACKAGE.glob("*.pyi")}
