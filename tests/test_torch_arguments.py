"""What comes from torch as it is: arguments that only its loader needs, and its datasets. torch is never imported.

The tests with the real torch and Hugging Face `datasets` are skipped where these are not installed. The latter has the
name of our module of datasets for tests, so it is used in a child process that does not see that.
"""

import multiprocessing
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from conftest import eventually, without_address
from toy_datasets import CountingDataset, Ids

from dataloader_rs import PyDataloader

# Names and defaults as torch has them.
DEFAULTS = {"generator": None, "prefetch_factor": None, "persistent_workers": False, "multiprocessing_context": None,
            "pin_memory_device": ""}
GIVEN = {"prefetch_factor": 4, "persistent_workers": True, "multiprocessing_context": "spawn",
         "pin_memory_device": "cuda"}


# ---- arguments ----

@pytest.mark.parametrize(("name", "default"), DEFAULTS.items())
def test_default_is_that_of_torch(name, default):
    """B55: trainers read these, and find what torch's loader would have had."""
    assert getattr(PyDataloader(Ids(3)), name) == default


@pytest.mark.parametrize("options", [GIVEN, *({name: value} for name, value in GIVEN.items())], ids=str)
def test_argument_is_taken_in_silence(options, num_workers):
    """No warning, no other batches, with any number of workers; each is read back as it was given."""
    loader = PyDataloader(Ids(7), 2, num_workers=num_workers, **options)
    assert {name: getattr(loader, name) for name in options} == options
    assert list(loader) == [[0, 1], [2, 3], [4, 5], [6]]


@pytest.mark.parametrize("method", [None, *multiprocessing.get_all_start_methods()])
def test_multiprocessing_context_may_be_an_object(method):
    """What ``multiprocessing.get_context()`` returns, and the names of start methods."""
    context = multiprocessing.get_context(method)
    assert PyDataloader(Ids(3), multiprocessing_context=context).multiprocessing_context is context
    assert PyDataloader(Ids(3), multiprocessing_context=method).multiprocessing_context == method


@pytest.mark.parametrize("value", [5, True, multiprocessing, b"fork", ["fork"]], ids=repr)
def test_multiprocessing_context_of_a_wrong_type_is_a_type_error(value):
    """The message has the name, the rule and the value."""
    with pytest.raises(TypeError) as caught:
        PyDataloader(Ids(3), multiprocessing_context=value)
    assert str(caught.value).startswith("multiprocessing_context must be the name of a start method, a multiprocessing "
                                        "context or None, got ")
    assert str(caught.value).endswith(f"({type(value).__name__})")


@pytest.mark.parametrize("value", ["", "thread", "Spawn"])
def test_unknown_start_method_is_a_value_error(value):
    """It would have had no effect, but it is a mistake all the same."""
    with pytest.raises(ValueError) as caught:
        PyDataloader(Ids(3), multiprocessing_context=value)
    assert str(caught.value) == f"multiprocessing_context must be one of fork, spawn, forkserver, got {value!r}"


@pytest.mark.parametrize("value", [0, None, b"cuda", True], ids=repr)
def test_device_of_a_wrong_type_is_a_type_error(value):
    """The message has the name, the rule and the value."""
    with pytest.raises(TypeError) as caught:
        PyDataloader(Ids(3), pin_memory_device=value)
    assert str(caught.value) == f"pin_memory_device must be a str, got {value!r} ({type(value).__name__})"


# ---- prefetch_factor ----

@pytest.mark.parametrize("prefetch_factor", [1, 2, 3])
@pytest.mark.parametrize("num_workers", [1, 4])
def test_as_many_batches_are_ahead_as_with_torch(num_workers, prefetch_factor):
    """Exactly prefetch_factor * num_workers are in progress or waiting, besides those that were taken."""
    dataset = CountingDataset(400)
    batches = iter(PyDataloader(dataset, 2, num_workers=num_workers, prefetch_factor=prefetch_factor))
    for taken in (1, 2, 3):
        next(batches)
        bound = 2 * (taken + num_workers * prefetch_factor)
        assert eventually(lambda bound=bound: len(dataset.started) >= bound)
        assert sorted(dataset.started) == list(range(bound))
    assert len(list(batches)) == 197
    assert len(dataset.started) == 400


def test_depth_is_as_without_it_if_it_is_not_given():
    """None is torch's default as well, and leaves prefetch_depth in force."""
    dataset = CountingDataset(100)
    batches = iter(PyDataloader(dataset, prefetch_depth=5, num_workers=2, prefetch_factor=None))
    next(batches)
    assert eventually(lambda: len(dataset.started) >= 8)
    assert sorted(dataset.started) == list(range(8))


@pytest.mark.parametrize("prefetch_depth", [1, 3, 2**70])
def test_prefetch_factor_with_a_depth_is_a_value_error(prefetch_depth):
    """One of the two says how far ahead; the message names both."""
    with pytest.raises(ValueError) as caught:
        PyDataloader(Ids(3), prefetch_depth=prefetch_depth, prefetch_factor=2)
    assert str(caught.value) == (f"prefetch_factor and prefetch_depth are mutually exclusive, "
                                 f"got prefetch_factor=2 and prefetch_depth={prefetch_depth}")


def test_prefetch_factor_with_the_default_depth_is_fine():
    """So a loader can be rebuilt from what is read back, and with another number of workers."""
    loader = PyDataloader(Ids(9), num_workers=2, prefetch_factor=3)
    assert (loader.prefetch_depth, loader.prefetch_factor) == (2, 3)
    names = ["dataset", "prefetch_depth", "prefetch_factor"]
    rebuilt = PyDataloader(num_workers=1, **{name: getattr(loader, name) for name in names})
    assert list(rebuilt) == list(loader)


@pytest.mark.parametrize("prefetch_factor", [2**31, 2**63, 10**30])
def test_huge_prefetch_factor_costs_nothing(prefetch_factor, num_workers):
    """It means "all of it": nothing of that size is allocated, no product wraps."""
    loader = PyDataloader(Ids(9), 2, num_workers=num_workers, prefetch_factor=prefetch_factor)
    assert list(loader) == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]


# ---- datasets of other libraries ----

class Lookalike:
    """Has the two methods, and says that it is a dataset of torch."""

    __module__ = "torch.utils.data"

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return index


Lookalike.__name__ = Lookalike.__qualname__ = "Dataset"


@pytest.mark.parametrize("value", [[1, 2], (1,), {0: 1}, "abc", np.arange(3), Lookalike(), None, Lookalike],
                         ids=without_address)
def test_anything_else_stays_a_type_error(value):
    """Lists, arrays, dicts and look-alikes go through ``PyDataset.of``, as the message says."""
    with pytest.raises(TypeError, match=r"^dataset must be a PyDataset .*PyDataset\.of\("):
        PyDataloader(value)


FAKES = """
import sys
import types
from dataloader_rs import PyDataloader, PyDataset

class Dataset:
    def __getitem__(self, index):
        raise NotImplementedError

class IterableDataset(Dataset):
    pass

class ArrowDataset:
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return {"x": index}

    def __getitems__(self, indices):
        return [{"x": index, "together": len(indices)} for index in indices]

class Squares(Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return index * index

def refused(dataset, *words):
    try:
        PyDataloader(dataset)
    except TypeError as error:
        return str(error).startswith("dataset must be ") and all(word in str(error) for word in words)

def imported(**modules):
    for name, kinds in modules.items():
        name = name.replace("__", ".")
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update({kind.__name__.removeprefix("Arrow"): kind for kind in kinds})
"""


def test_dataset_of_an_imported_library_is_accepted(run_script):
    """torch's ``Dataset`` and that of Hugging Face, by what is in ``sys.modules``; before, they are unknown objects."""
    run_script(FAKES + textwrap.dedent("""
        squares, arrow = Squares(), ArrowDataset()
        assert refused(squares, "PyDataset.of") and refused(arrow, "PyDataset.of")
        imported(torch__utils__data=[Dataset, IterableDataset], datasets__arrow_dataset=[ArrowDataset])
        for workers in (0, 1, 4):
            loader = PyDataloader(squares, batch_size=2, num_workers=workers)
            assert loader.dataset is squares
            assert len(loader) == 3
            assert list(loader) == [[0, 1], [4, 9], [16]]
            loader = PyDataloader(arrow, batch_size=3, num_workers=workers)
            assert loader.dataset is arrow
            assert list(loader)[1] == [{"x": 3, "together": 2}, {"x": 4, "together": 2}]
        assert repr(loader) == "PyDataloader(ArrowDataset, batch_size=3, num_workers=4)"
        assert refused([1, 2], "PyDataset.of") and refused({0: 1}, "PyDataset.of") and refused(Squares, "PyDataset.of")
        """))


def test_module_of_the_same_name_is_not_that_of_hugging_face(run_script):
    """A program's own ``datasets.py`` may have a class ``Dataset``; that makes its instances no exception."""
    run_script(FAKES + textwrap.dedent("""
        imported(datasets=[ArrowDataset], torch=[Dataset])
        assert refused(ArrowDataset(), "PyDataset.of") and refused(Squares(), "PyDataset.of")
        sys.modules["torch.utils.data"] = None      # how an import is forbidden
        sys.modules["datasets.arrow_dataset"] = types.ModuleType("half imported")
        assert refused(ArrowDataset(), "PyDataset.of") and refused(Squares(), "PyDataset.of")
        assert list(PyDataloader(PyDataset.of(ArrowDataset()), 5))[0][4] == {"x": 4, "together": 5}
        """))


def test_dataset_without_a_length_works_with_a_sampler(run_script):
    """torch's base class has no ``__len__``: that shows where the length is needed, as with torch."""
    run_script(FAKES + textwrap.dedent("""
        imported(torch__utils__data=[Dataset, IterableDataset])
        del Squares.__len__
        assert list(PyDataloader(Squares(), sampler=[3, 1], num_workers=1)) == [[9], [1]]
        try:
            iter(PyDataloader(Squares()))
        except TypeError as error:
            assert "len" in str(error)
        else:
            raise AssertionError("no error")
        """))


def test_datasets_that_are_iterated_are_accepted_as_they_are(run_script):
    """An IterableDataset of torch, or of Hugging Face, is a stream."""
    run_script(FAKES + textwrap.dedent("""
        class Numbers(IterableDataset):
            def __iter__(self):
                return iter(range(5))

        class Streamed:
            def __iter__(self):
                return iter([{"x": 1}, {"x": 2}])

        imported(torch__utils__data=[Dataset, IterableDataset])
        for num_workers in (0, 2):
            numbers = Numbers()
            loader = PyDataloader(numbers, 2, num_workers=num_workers)
            assert loader.dataset is numbers
            assert list(loader) == [[0, 1], [2, 3], [4]]
        Streamed.__name__ = "IterableDataset"
        imported(datasets__iterable_dataset=[Streamed])
        assert list(PyDataloader(Streamed(), num_workers=2)) == [[{"x": 1}], [{"x": 2}]]
        try:
            PyDataloader(Numbers(), shuffle=True)
        except ValueError as error:
            assert str(error).startswith("shuffle is not for an iterable dataset")
        else:
            raise AssertionError("no error")
        """))


def test_loading_imports_neither_library(run_script):
    """Making and iterating a loader leaves `torch`, `datasets` and NumPy alone."""
    run_script("""
        import sys
        from dataloader_rs import PyDataloader, PyDataset
        loader = PyDataloader(PyDataset.of("abc"), shuffle=True, num_workers=1, prefetch_factor=2,
                              multiprocessing_context="fork", pin_memory_device="cuda", persistent_workers=True)
        assert len(list(loader)) == 3
        try:
            PyDataloader([1])
        except TypeError:
            pass
        assert not {"torch", "datasets", "numpy", "multiprocessing"} & set(sys.modules)
        """)


def test_real_torch_dataset_is_accepted(num_workers):
    """A dataset that subclasses that of the installed torch, `Subset`, which has ``__getitems__``, `ConcatDataset`."""
    data = pytest.importorskip("torch").utils.data

    class Squares(data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            return index * index

    squares = Squares()
    loader = PyDataloader(squares, 4, num_workers=num_workers)
    assert loader.dataset is squares
    assert list(loader) == [[0, 1, 4, 9], [16, 25]]
    assert list(PyDataloader(data.Subset(squares, [5, 0, 2]), 2, num_workers=num_workers)) == [[25, 0], [4]]
    assert sum(PyDataloader(data.ConcatDataset([squares, squares]), num_workers=num_workers), [])[6:] == list(
        map(squares.__getitem__, range(6)))


def test_real_hugging_face_dataset_is_accepted(tmp_path):
    """A ``datasets.Dataset`` of the installed library, with ``__getitems__``, also ``with_format("numpy")``."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent("""
        try:
            import datasets
        except ImportError:
            raise SystemExit(77)
        from dataloader_rs import PyDataloader
        rows = datasets.Dataset.from_dict({"x": list(range(10))})
        for workers in (0, 1, 4):
            loader = PyDataloader(rows, batch_size=4, num_workers=workers)
            assert loader.dataset is rows
            assert [[row["x"] for row in batch] for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
            arrays = PyDataloader(rows.with_format("numpy"), batch_size=10, num_workers=workers)
            assert [int(row["x"]) for row in next(iter(arrays))] == list(range(10))
        """))
    here = os.path.dirname(__file__)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != here]
    paths.append(os.path.dirname(here))
    finished = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, cwd=tmp_path,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    if finished.returncode == 77:
        pytest.skip("Hugging Face datasets is not installed")
    assert finished.returncode == 0, finished.stderr
