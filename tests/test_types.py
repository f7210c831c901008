"""What type checkers are told is what is there. `make types` runs the checkers; these tests need none of them."""

import inspect
import runpy
import typing
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
from toy_datasets import Ids

from dataloader_rs import PyDataloader, PyDataloaderIter, PyDataset, PyIterableDataset
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


def test_overloads_have_the_arguments_of_the_loader():
    """Each overload has all arguments, in order, with the same defaults: the others are in LoaderOptions."""
    real = parameters_of(PyDataloader.__init__)
    overloads = typing.get_overloads(PyDataloader.__init__)
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
    """Libraries that ask for the types of arguments at run time get them."""
    assert set(typing.get_type_hints(PyDataloader.__init__)) == ARGUMENTS | {"return"}


def test_generic_classes_take_parameters_at_run_time():
    """``PyDataloader`` takes the type of a sample, and perhaps that of a batch; a subclass has its own parameters."""
    class Pairs(PyDataloader[T, tuple[T, T]], Generic[T]):
        pass

    assert typing.get_args(PyDataloader[int, str]) == (int, str)
    assert typing.get_args(PyDataloader[int]) == (int, Any)
    assert typing.get_args(Pairs[int]) == (int,)
    assert typing.get_origin(Pairs[int]) is Pairs
    assert typing.get_args(PyDataloaderIter[int]) == (int,)
    assert typing.get_args(PyDataset[int]) == typing.get_args(PyIterableDataset[int]) == (int,)
    assert list(PyDataloader[int, list[int]](Ids(1))) == list(PyDataloader[int](Ids(1))) == [[0]]
    with pytest.raises(TypeError):
        PyDataloader[int, str, bytes]


def test_extensions_have_stubs():
    """The package says that it has types, and each extension has a stub."""
    assert (PACKAGE / "py.typed").exists()
    assert {path.stem for path in PACKAGE.glob("*.pyx")} == {path.stem for path in PACKAGE.glob("*.pyi")}
