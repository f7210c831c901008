"""What type checkers are to make of the interface. `make types` checks it; an error that is missing is an error, too.

`tests/test_types.py` runs it as well: what type checkers accept must not be refused at run time.
"""

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, assert_type

from dataloader_rs import (
    BatchTimeoutError,
    PyDataloader,
    PyDataloaderIter,
    PyDataset,
    PyDatasetBase,
    PyIterableDataset,
    WorkerInfo,
    default_collate,
    get_worker_info,
    register_collate,
    sample_rng,
    share,
)

if TYPE_CHECKING:
    import numpy


class Squares(PyDataset[int]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        return index * index

    def __getitems__(self, indices: list[int]) -> Iterable[int]:
        return [index * index for index in indices]


class Serial(Squares):
    serial_dataset = True


class Unannotated(PyDatasetBase):  # type: ignore[type-arg]
    def __len__(self):  # type: ignore[no-untyped-def]
        return 3

    def __getitem__(self, index):  # type: ignore[no-untyped-def] # pyright: ignore
        return index


class Countdown(PyIterableDataset[str]):
    def __iter__(self) -> Iterator[str]:
        yield from "321"

    def shards(self, num_shards: int) -> Iterable[Iterable[str]]:
        return [self, *([""] * (num_shards - 1))]


@dataclass
class Point:
    x: float
    y: float


def joined(samples: list[int]) -> str:
    return ", ".join(map(str, samples))


def named(sample: int) -> str:
    return f"sample {sample}"


def of_iterable(samples: Iterable[object]) -> set[object]:
    return set(samples)


def of_words(words: list[str]) -> int:
    return len(words)


squares = Squares()


def batches() -> None:
    """The type of a batch follows collate_fn and batch_size."""
    assert_type(PyDataloader(squares), PyDataloader[int, list[int]])
    assert_type(PyDataloader(squares, 2, 4, True, None, 2), PyDataloader[int, list[int]])
    assert_type(PyDataloader(squares, batch_size=None), PyDataloader[int, int])
    assert_type(PyDataloader(squares, collate_fn=joined), PyDataloader[int, str])
    assert_type(PyDataloader(squares, 2, 2, False, None, 0, joined), PyDataloader[int, str])
    assert_type(PyDataloader(squares, batch_size=None, collate_fn=named), PyDataloader[int, str])
    assert_type(PyDataloader(squares, collate_fn=len), PyDataloader[int, int])
    assert_type(PyDataloader(squares, collate_fn=tuple), PyDataloader[int, tuple[int, ...]])
    assert_type(PyDataloader(squares, collate_fn=lambda samples: samples[0] / 2), PyDataloader[int, float])
    assert_type(PyDataloader(squares, collate_fn=default_collate), PyDataloader[int, Any])
    assert_type(PyDataloader(squares, batch_sampler=[[0, 1], [2]]), PyDataloader[int, list[int]])
    assert_type(PyDataloader(squares, None, batch_sampler=[[0, 1], [2]]), PyDataloader[int, list[int]])
    assert_type(PyDataloader(squares, collate_fn=joined, batch_sampler=[[0], [2]]), PyDataloader[int, str])
    assert_type(PyDataloader(squares, None, collate_fn=joined, batch_sampler=[[0], [2]]), PyDataloader[int, str])
    assert_type(PyDataloader(Serial(), 2, num_workers=2, seed=1, shuffle=True), PyDataloader[int, list[int]])
    assert_type(PyDataloader(Countdown(), 2), PyDataloader[str, list[str]])
    assert_type(PyDataloader(Unannotated()), PyDataloader[Any, list[Any]])


def options() -> None:
    """All arguments at once, and loaders as attributes of which the arguments come back."""
    loader = PyDataloader(
        squares, batch_size=2, prefetch_depth=2, shuffle=True, sampler=None, num_workers=1, collate_fn=None,
        drop_last=True, seed=None, items_in_parallel=1, batch_sampler=None, timeout=60.0, in_order=True,
        across_epochs=True, defer_refcount=True, adaptive=True, generator=random.Random(0), prefetch_factor=2,
        persistent_workers=True, multiprocessing_context="fork", pin_memory=False, pin_memory_device="",
        serial_dataset=False, worker_init_fn=print_nothing, worker_exit_fn=print_nothing, rng_seed=1,
    )
    assert_type(loader, PyDataloader[int, list[int]])
    assert_type(loader.batch_size, int | None)
    assert_type(loader.num_workers, int)
    assert_type(loader.rng_seed, int)
    assert_type(len(loader), int)
    with loader as same:
        assert_type(same, PyDataloader[int, list[int]])
        same.set_epoch(3)


def print_nothing(worker: int) -> None:
    assert worker == 0


def iterators() -> None:
    """Iterators give batches, also through a loop."""
    loader = PyDataloader(squares, collate_fn=joined)
    iterator = iter(loader)
    assert_type(iterator, PyDataloaderIter[str])
    assert_type(next(iterator), str)
    assert_type(len(iterator), int)
    for batch in loader:
        assert_type(batch, str)
    as_iterable: Iterable[str] = loader
    assert list(as_iterable) == ["0", "1", "4", "9", "16"]


def datasets() -> None:
    """What is wrapped keeps the type of its items."""
    assert_type(PyDataset.of("abc"), PyDataset[str])
    assert_type(PyDataset.of([1.5]), PyDataset[float])
    assert_type(PyDataset.of(squares), PyDataset[int])
    assert_type(PyDataset.of(squares)[1], int)
    assert_type(PyIterableDataset.of(iter([1, 2])), PyIterableDataset[int])
    assert_type(PyDataloader(PyDataset.of("abc"), 3), PyDataloader[str, list[str]])
    assert_type(PyDataloader(squares, collate_fn=of_iterable), PyDataloader[int, set[object]])
    squares.serial_dataset = True
    squares.serial_dataset = False


def annotations(loader: PyDataloader[int], dataset: PyDataset[bool]) -> PyDataloader[object, object]:
    """With one parameter, as torch's DataLoader has it, a batch may be anything. All parameters are covariant."""
    assert_type(loader, PyDataloader[int, Any])
    wider: PyDataset[int] = dataset
    return PyDataloader(wider)


def either(size: int | None) -> None:
    """Where it is open whether there are batches, so is their type."""
    assert_type(PyDataloader(squares, size), PyDataloader[int, Any])


def samples() -> None:
    """What code that a loader calls may ask."""

    class Noise(Squares):
        def __getitem__(self, index: int) -> int:
            rng = sample_rng()
            info = get_worker_info()
            assert_type(info, WorkerInfo | None)
            assert info is None
            if TYPE_CHECKING:
                assert_type(rng, numpy.random.Generator)
            return int(rng.integers(10))

        def __getitems__(self, indices: list[int]) -> list[int]:
            return [int(sample_rng(offset).integers(10)) for offset in range(len(indices))]

    assert_type(next(iter(PyDataloader(Noise()))), list[int])


def functions() -> None:
    """Functions beside the loader."""
    words = {"the": 0}
    assert_type(share(words, immortal=False), dict[str, int])
    assert_type(default_collate([1, 2]), Any)
    register_collate(Point, lambda points: Point(points[0].x, points[0].y))
    error = BatchTimeoutError("late")
    as_timeout: TimeoutError = error
    as_runtime_error: RuntimeError = error
    assert isinstance(as_timeout, type(as_runtime_error))


class Concat:
    datasets: list[object] = []


class TorchLike:
    """Has the signatures of ``torch.utils.data.Dataset[bytes]``."""

    def __getitem__(self, index: Any) -> bytes:
        raise NotImplementedError

    def __add__(self, other: "TorchLike") -> Concat:
        raise NotImplementedError


class TorchStream(TorchLike):
    """Has the signatures of ``torch.utils.data.IterableDataset[bytes]``."""

    def __iter__(self) -> Iterator[bytes]:
        raise NotImplementedError


class HuggingFaceLike:
    """Has the signatures of ``datasets.Dataset``."""

    @property
    def features(self) -> dict[str, object]:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, key: int | slice) -> Mapping[str, object]:
        raise NotImplementedError


class HuggingFaceStream:
    """Has the signatures of ``datasets.IterableDataset``."""

    @property
    def features(self) -> dict[str, object] | None:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Mapping[str, object]]:
        raise NotImplementedError


if TYPE_CHECKING:
    # Only real datasets of torch and Hugging Face are taken at run time.
    assert_type(PyDataloader(TorchLike()), PyDataloader[bytes, list[bytes]])
    assert_type(PyDataloader(TorchStream(), None), PyDataloader[bytes, bytes])
    assert_type(PyDataloader(HuggingFaceLike(), 4), PyDataloader[Mapping[str, object], list[Mapping[str, object]]])
    assert_type(PyDataloader(HuggingFaceStream(), None), PyDataloader[Mapping[str, object], Mapping[str, object]])
    assert_type(PyDataloader(squares, collate_fn="torch"), PyDataloader[int, Any])
    assert_type(PyDataloader(squares, None, collate_fn="torch"), PyDataloader[int, Any])


def mistakes(number: int) -> None:
    """What must not pass. None of this runs."""
    if not TYPE_CHECKING:
        return
    PyDataloader([1, 2, 3])  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    PyDataloader({0: "a"})  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    PyDataloader("abc")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    PyDataloader(squares, batch_size="2")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    PyDataloader(squares, num_worker=2)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    PyDataloader(squares, collate_fn=of_words)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    PyDataloader(squares, collate_fn=named)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    PyDataloader(squares, None, collate_fn=joined)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    PyDataloader(squares, collate_fn="numpy")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    PyDataloader(squares, sampler=["a"])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType, reportCallIssue]
    PyDataloader(squares, batch_sampler=[0, 1])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType, reportCallIssue]
    PyDataloader(squares, timeout=None)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    PyDataloader(squares, worker_init_fn=named, worker_exit_fn=of_words)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    PyDataset.of(number)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    PyDataset.of({"a": 1})  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType]
    PyDataset.of(iter("abc"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    PyIterableDataset.of(number)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    loader: PyDataloader[int, str] = PyDataloader(squares)  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    loader.epoch  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    loader.batch_size = "2"  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
    share(squares, True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    register_collate(Point, of_words)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    for check in (batches, options, iterators, datasets, samples, functions):
        check()
