"""PyDataloader: arguments and epochs. Knows no locks and starts no threads itself."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from dataloader_rs._core import Counter, PyDataloaderIter, Recipe, start_epoch
from dataloader_rs._shuffle import ShuffledOrder
from dataloader_rs.arguments import check_callable, checked_count, checked_flag, checked_integer, checked_seed
from dataloader_rs.dataset import PyDataset, dataset_name, fetch_many_of, indexed_object
from dataloader_rs.errors import not_the_end, shown
from dataloader_rs.pools import LoaderPools
from dataloader_rs.sampler import IndexStream, read_all
from dataloader_rs.worker_info import Crew

B_co = TypeVar("B_co", covariant=True)

MAX_THREADS = 65_536
MAX_COUNT = 2**63 - 1
SEED_END = 2**64


class PyDataloader(Generic[B_co]):
    """Loads the batches of a dataset, in order, on worker threads.

    Parameters
    ----------
    dataset : PyDataset
        Where samples come from.
    batch_size : int
        Samples in a batch, > 0.
    prefetch_depth : int
        How far ahead of the consumer workers may load, > 0: at most ``num_workers + prefetch_depth`` batches are in
        progress or waiting. Without effect when `num_workers` is 0.
    shuffle : bool
        A new random order every epoch. Exclusive with `sampler`.
    sampler : iterable of int, optional
        The indices of an epoch, iterated at the start of each. One with a length is read whole then; one without is
        read up to 65,536 indices then and on demand beyond, so that it may be endless.
    num_workers : int
        Batches loaded in parallel, >= 0; with 0 the calling thread loads each batch when it is asked for.
    collate_fn : callable, optional
        ``collate_fn(list of samples) -> batch``; runs on the worker that loaded the batch (with 0 workers on the
        calling thread). Without it a batch is the list.
    drop_last : bool
        Leave out a last batch that is smaller than `batch_size`.
    seed : int, optional
        For ``shuffle=True`` only, ``0 <= seed < 2**64``: same seed, same sequence of epoch orders, for any number of
        workers, on every machine and version of Python. Without it every loader has orders of its own.
    items_in_parallel : int
        Items of one batch fetched at once, > 0, each by one ``__getitem__`` call (``__getitems__`` is not used when
        it is more than 1), so that ``num_workers * items_in_parallel`` requests are in flight.
    defer_refcount : bool
        On free-threaded CPython 3.14 and newer: let the interpreter defer the reference counts of `dataset` and
        `collate_fn`, without which workers slow each other down. The two are then freed by the garbage collector
        only, not when their last reference goes. Without effect elsewhere.
    adaptive : bool
        Keep workers parked for as long as fewer of them get more items done, which the loader tries out from time to
        time; `num_workers` and `items_in_parallel` are then a ceiling. Items that wait for each other are not held up
        by it for more than a few milliseconds. With False all workers take part always.
    worker_init_fn : callable, optional
        ``worker_init_fn(worker_id)`` is called once on each worker, when its thread starts, before its first sample;
        ids are 0 .. ``num_workers * items_in_parallel - 1``. The first ``next()`` waits until it has returned on all of
        them. What it raises comes out there and is the end of that epoch; the next ``iter()`` starts new threads. Never
        called when `num_workers` is 0.
    worker_exit_fn : callable, optional
        ``worker_exit_fn(worker_id)`` is called once on each worker, when its thread ends: on ``close()``, when the
        loader is dropped, or at exit, but not on a worker that `worker_init_fn` failed on, or that is stuck in a call
        at exit. What it raises goes to `sys.unraisablehook`. Never called when `num_workers` is 0.
    rng_seed : int, optional
        What the random numbers of `sample_rng` and the seeds of workers are keyed by, ``0 <= rng_seed < 2**64``. By
        default it is `seed`, and without that every loader has its own; the attribute is the number really used.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong type, or a value that breaks a rule; the message names all three.

    Notes
    -----
    ``iter(loader)`` starts an epoch: the k-th call is epoch k, finished or not. Threads start at the first one, and
    serve all further epochs. *Thread safety.* Any thread may start epochs; they share the workers fairly.

    Examples
    --------
    >>> from dataloader_rs import PyDataloader, PyDataset
    >>> loader = PyDataloader(PyDataset.of("abcde"), batch_size=2, num_workers=2)
    >>> list(loader)
    [['a', 'b'], ['c', 'd'], ['e']]
    """

    def __init__(
        self,
        dataset: PyDataset,
        batch_size: int = 1,
        prefetch_depth: int = 2,
        shuffle: bool = False,
        sampler: Iterable[int] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list], B_co] | None = None,
        drop_last: bool = False,
        seed: int | None = None,
        items_in_parallel: int = 1,
        *,
        defer_refcount: bool = True,
        adaptive: bool = True,
        worker_init_fn: Callable[[int], object] | None = None,
        worker_exit_fn: Callable[[int], object] | None = None,
        rng_seed: int | None = None,
    ) -> None:
        if not isinstance(dataset, PyDataset):
            raise TypeError(f"dataset must be a PyDataset (PyDatasetBase), got {type(dataset).__name__}: subclass "
                            f"dataloader_rs.PyDataset, or wrap the object with PyDataset.of(obj)")
        batch_size = checked_count("batch_size", batch_size, least=1)
        prefetch_depth = checked_count("prefetch_depth", prefetch_depth, least=1)
        num_workers = checked_count("num_workers", num_workers, least=0)
        items_in_parallel = checked_count("items_in_parallel", items_in_parallel, least=1)
        shuffle = checked_flag("shuffle", shuffle)
        drop_last = checked_flag("drop_last", drop_last)
        defer_refcount = checked_flag("defer_refcount", defer_refcount)
        adaptive = checked_flag("adaptive", adaptive)
        if seed is not None:
            seed = checked_integer("seed", seed)
        if collate_fn is not None and not callable(collate_fn):
            raise TypeError(f"collate_fn must be callable or None, got {shown(collate_fn)}")
        if sampler is not None and not _is_iterable(sampler):
            raise TypeError(f"sampler must be an iterable of indices or None, got {shown(sampler)}")
        if max(num_workers, 1) * items_in_parallel > MAX_THREADS:
            raise ValueError(f"num_workers * items_in_parallel must be <= {MAX_THREADS} threads, "
                             f"got {shown(num_workers)} * {shown(items_in_parallel)}")
        if shuffle and sampler is not None:
            raise ValueError(f"shuffle and sampler are mutually exclusive, "
                             f"got shuffle=True and sampler={shown(sampler)}")
        if seed is not None and not shuffle:
            raise ValueError(f"seed needs shuffle=True, got seed={shown(seed)} with shuffle=False")
        if seed is not None and not 0 <= seed < SEED_END:
            raise ValueError(f"seed must be >= 0 and < 2**64, got {shown(seed)}")
        check_callable("worker_init_fn", worker_init_fn)
        check_callable("worker_exit_fn", worker_exit_fn)
        if rng_seed is not None:
            rng_seed = checked_seed("rng_seed", rng_seed)
        vars(self).update(
            dataset=dataset, batch_size=batch_size, prefetch_depth=prefetch_depth, shuffle=shuffle, sampler=sampler,
            num_workers=num_workers, collate_fn=collate_fn, drop_last=drop_last, seed=seed,
            items_in_parallel=items_in_parallel, defer_refcount=defer_refcount, adaptive=adaptive,
            worker_init_fn=worker_init_fn, worker_exit_fn=worker_exit_fn, _given_rng_seed=rng_seed,
        )
        self._prepare()

    def _prepare(self) -> None:
        """Make what is not an argument: it belongs to this object and this process."""
        seed = self.seed if self._given_rng_seed is None else self._given_rng_seed
        vars(self)["rng_seed"] = int.from_bytes(os.urandom(8)) if seed is None else seed
        self._recipe = Recipe(
            indexed_object(self.dataset), fetch_many_of(self.dataset), self.collate_fn,
            min(self.batch_size, MAX_COUNT), self.num_workers, min(self.prefetch_depth, MAX_COUNT),
            self.items_in_parallel, self.defer_refcount, self.rng_seed,
        )
        self._order_seed = int.from_bytes(os.urandom(8)) if self.seed is None else self.seed
        self._epochs = Counter()
        self._pools = LoaderPools()

    def __iter__(self) -> PyDataloaderIter[B_co]:
        pool = self._pools.here().started(self._recipe.num_threads, self.adaptive, self._new_crew)
        pool.check_caller()
        try:
            indices, num_items, stream, epoch = self._order()
        except StopIteration as error:
            # A caller that is an iterator itself would take it for its own end.
            raise not_the_end(error) from error
        return start_epoch(self._recipe, pool, indices, num_items, stream, epoch)

    def __len__(self) -> int:
        if self.sampler is None:
            num_items = len(self.dataset)
        else:
            try:
                num_items = len(self.sampler)  # type: ignore[arg-type]
            except NotImplementedError as error:
                raise TypeError(f"sampler {shown(self.sampler)} does not say how long it is") from error
        return num_items // self.batch_size if self.drop_last else -(-num_items // self.batch_size)

    def close(self) -> None:
        """End the worker threads, and wait until they have left user code, so that files can be closed after it.

        Never needed: a loader that is dropped ends its threads too, without waiting. May be called twice. Iterators
        in mid-epoch raise RuntimeError from then on; a new ``iter(loader)`` starts new threads. Ctrl-C ends the wait.

        Raises
        ------
        RuntimeError
            On one of the workers, which cannot wait for itself.
        """
        self._pools.here().close()

    def __enter__(self) -> PyDataloader[B_co]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        # Without rng_seed, which never is its default: a loader rebuilt from the attributes of another looks the same.
        given = [f"{name}={shown(getattr(self, name))}" for name, default in DEFAULTS.items()
                 if name != "rng_seed" and getattr(self, name) is not default]
        return f"{type(self).__name__}({', '.join([dataset_name(self.dataset), *given])})"

    def __setattr__(self, name: str, value: object) -> None:
        if name in ARGUMENTS and "_recipe" in vars(self):
            raise AttributeError(f"{name} is an argument of the loader and cannot be set: make a new PyDataloader")
        super().__setattr__(name, value)

    def __getstate__(self) -> tuple[dict[str, object], dict[str, object]]:
        """The arguments and what else was set, in the dictionary and in the slots of a subclass; no threads."""
        state: Any = super().__getstate__()
        in_dictionary, in_slots = state if isinstance(state, tuple) else (state, {})
        return {name: value for name, value in in_dictionary.items() if name not in RUNTIME}, in_slots

    def __setstate__(self, state: tuple[dict[str, object], dict[str, object]]) -> None:
        in_dictionary, in_slots = state
        vars(self).update(in_dictionary)
        for name, value in in_slots.items():
            setattr(self, name, value)
        self._prepare()

    def _new_crew(self) -> Crew | None:
        """What the workers of a new pool know of themselves."""
        if self.num_workers == 0:
            return None
        return Crew(self.dataset, self.num_workers, self._recipe.num_threads, self.rng_seed, self.worker_init_fn,
                    self.worker_exit_fn)

    def _order(self) -> tuple[object, int, IndexStream | None, int]:
        """Indices of the next epoch, how many of them make up batches, where further ones come from; its number."""
        stream = None
        indices: Any
        if self.sampler is None:
            length = len(self.dataset)
            epoch = self._epochs.take()
            indices = ShuffledOrder(length, self._order_seed, epoch) if self.shuffle else range(length)
        else:
            length = _known_length(self.sampler)
            if length is not None:
                indices = read_all(self.sampler)
            else:
                stream = IndexStream(self.sampler, self._recipe.batch_size, self.drop_last)
                indices = stream.head
                if stream.ended:
                    stream = None
            is_empty = stream is None and not indices
            epoch = self._epochs.take()
            if epoch > 0 and is_empty and (length or isinstance(self.sampler, Iterator)):
                warnings.warn(f"sampler {shown(self.sampler)} yields nothing, as an iterator does that an earlier "
                              f"epoch has used up: this epoch is empty", RuntimeWarning, stacklevel=3)
        num_items = len(indices)
        if self.drop_last:
            num_items -= num_items % self._recipe.batch_size
        return indices, num_items, stream, epoch


DEFAULTS = {parameter.name: parameter.default
            for parameter in inspect.signature(PyDataloader).parameters.values()
            if parameter.default is not parameter.empty}
ARGUMENTS = frozenset(DEFAULTS) | {"dataset"}
RUNTIME = frozenset({"rng_seed", "_recipe", "_order_seed", "_epochs", "_pools"})


def _is_iterable(value: object) -> bool:
    return isinstance(value, Iterable) or hasattr(type(value), "__getitem__")


def _known_length(sampler: object) -> int | None:
    """How long the sampler says it is. Some have a ``__len__`` only to say that they do not know."""
    try:
        return len(sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
