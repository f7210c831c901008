from array import array
from collections.abc import Callable, Iterator
from types import GenericAlias
from typing import Any, Generic, Never, Protocol, TypeVar, final

from dataloader_rs._shuffle import ShuffledOrder
from dataloader_rs.worker_info import Crew

_B_co = TypeVar("_B_co", covariant=True)

class _Stream(Protocol):
    @property
    def ended(self) -> bool: ...
    @property
    def error(self) -> BaseException | None: ...
    def draw(self) -> list[list[int]]: ...

MAX_THREADS: int

def process_generation() -> int: ...

@final
class Counter:
    def take(self) -> int: ...

@final
class Recipe:
    batch_size: int
    num_threads: int
    def __new__(
        cls,
        dataset: object,
        fetch_many: Callable[[list[int]], Any] | None,
        collate_fn: Callable[[list[Any]], Any] | None,
        batch_size: int,
        num_workers: int,
        prefetch_depth: int,
        items_in_parallel: int,
        defer_refcount: bool,
        rng_seed: int,
        *,
        batched: bool = True,
        drop_last: bool = False,
        in_order: bool = True,
        timeout: float = 0,
    ) -> Recipe: ...

def current_worker() -> tuple[Crew, int] | None: ...
def current_request() -> tuple[int, int, int, dict[int, Any], int, int] | None: ...

ASKED_ITEM: int
ASKED_MANY: int
ASKED_COLLATE: int

def stack_size() -> int: ...
@final
class WorkerPool:
    generation: int
    num_threads: int
    crew: Crew | None
    def __new__(cls, num_threads: int, stack_size: int, adaptive: bool, crew: Crew | None) -> WorkerPool: ...
    @property
    def usable(self) -> bool: ...
    def check_started(self) -> None: ...
    def check_caller(self) -> None: ...
    def close(self) -> None: ...

class PyDataloaderIter(Generic[_B_co]):
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...  # only a loader makes one
    @classmethod
    def __class_getitem__(cls, item: Any, /) -> GenericAlias: ...
    def __iter__(self) -> PyDataloaderIter[_B_co]: ...
    def __next__(self) -> _B_co: ...
    def __len__(self) -> int: ...

def start_epoch(
    recipe: Recipe,
    pool: WorkerPool,
    source: range | ShuffledOrder | array[int] | list[int],
    num_items: int,
    stream: _Stream | None,
    epoch_number: int,
    after: PyDataloaderIter[Any] | None = None,
) -> PyDataloaderIter[Any]: ...
def start_stream(
    recipe: Recipe,
    pool: WorkerPool,
    readers: list[Iterator[Any]],
    num_items: int | None,
    on_end: Callable[[int], None],
    epoch_number: int,
) -> PyDataloaderIter[Any]: ...
