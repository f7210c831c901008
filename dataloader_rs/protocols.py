"""What a type checker knows of objects that are not ours. Imported by type checkers only, and by their users.

A dataset of another library is told by what no list, array or dict has, since those must be wrapped: PyDataset.of(obj).
Nobody's library has to be installed for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeAlias, TypedDict, TypeVar

from dataloader_rs.dataset import PyDataset
from dataloader_rs.stream import PyIterableDataset

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class SupportsLenGetitem(Protocol[T_co]):
    """What `PyDataset.of` takes."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> T_co: ...


class SupportsIter(Protocol[T_co]):
    """What `PyIterableDataset.of` takes."""

    def __iter__(self) -> Iterator[T_co]: ...


class Concatenated(Protocol):
    """What two datasets of torch add up to."""

    @property
    def datasets(self) -> Any: ...


class TorchDataset(Protocol[T_co]):
    """``torch.utils.data.Dataset``, which promises no length."""

    def __getitem__(self, index: int, /) -> T_co: ...

    def __add__(self, other: Any, /) -> Concatenated: ...


class TorchIterableDataset(Protocol[T_co]):
    """``torch.utils.data.IterableDataset``."""

    def __iter__(self) -> Iterator[T_co]: ...

    def __add__(self, other: Any, /) -> Concatenated: ...


class HuggingFaceDataset(Protocol[T_co]):
    """``datasets.Dataset``."""

    @property
    def features(self) -> Any: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> T_co: ...


class HuggingFaceIterableDataset(Protocol[T_co]):
    """``datasets.IterableDataset``."""

    @property
    def features(self) -> Any: ...

    def __iter__(self) -> Iterator[T_co]: ...


# What a loader loads from. Streams of other libraries come first: they have a __getitem__ as well, which only raises.
AnyDataset: TypeAlias = (
    PyDataset[T] | PyIterableDataset[T] | TorchIterableDataset[T] | TorchDataset[T] | HuggingFaceIterableDataset[T]
    | HuggingFaceDataset[T]
)


class LoaderOptions(TypedDict, total=False):
    """Arguments of a loader that have no say in what a batch is, and have to be named."""

    timeout: float
    in_order: bool
    across_epochs: bool
    defer_refcount: bool
    adaptive: bool
    generator: Any
    prefetch_factor: int | None
    persistent_workers: bool
    multiprocessing_context: Any
    pin_memory: bool
    pin_memory_device: str
    serial_dataset: bool | None
    worker_init_fn: Callable[[int], object] | None
    worker_exit_fn: Callable[[int], object] | None
    rng_seed: int | None


# The indices of each batch.
BatchSampler: TypeAlias = Iterable[Iterable[int]]
