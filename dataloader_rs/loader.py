"""PyDataloader: arguments and epochs. Knows no locks and starts no threads itself."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable

from dataloader_rs._core import MAX_THREADS, Counter, PyDataloaderIter, Recipe, WorkerPool, start_epoch, start_stream
from dataloader_rs._shuffle import ShuffledOrder
from dataloader_rs.ahead import EpochAhead
from dataloader_rs.arguments import (
    check_callable,
    check_exclusive,
    checked_count,
    checked_flag,
    checked_integer,
    checked_seconds,
    checked_uint64,
)
from dataloader_rs.dataset import PyDataset, checked_dataset, dataset_name, fetch_many_of, indexed_object
from dataloader_rs.epochs import EpochNumbers, is_told_epochs, tell_epoch
from dataloader_rs.errors import not_the_end, shown, type_name
from dataloader_rs.generators import checked_generator, draw_key
from dataloader_rs.hints import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload
from dataloader_rs.pools import LoaderPools
from dataloader_rs.sampler import BatchStream, IndexStream, is_iterable, is_iterator, warn_of_nothing
from dataloader_rs.serial import is_serial, serial_proxy_of
from dataloader_rs.stream import LengthCheck, PyIterableDataset, is_stream, readers_of
from dataloader_rs.torch_arguments import (
    checked_device,
    checked_multiprocessing_context,
    checked_prefetch_factor,
    depth_of_prefetch_factor,
    resolve_collate,
)
from dataloader_rs.worker_info import Crew

if TYPE_CHECKING:
    from typing import Self, Unpack

    import typing_extensions  # of the type checker

    from dataloader_rs.protocols import AnyDataset, BatchSampler, LoaderOptions

    T = TypeVar("T")
    B = TypeVar("B")
    B_co = typing_extensions.TypeVar("B_co", covariant=True, default=Any)
else:
    B_co = TypeVar("B_co", covariant=True)  # typing's own can have a default from 3.13 on

T_co = TypeVar("T_co", covariant=True)

MAX_COUNT = 2**63 - 1


class PyDataloader(Generic[T_co, B_co]):
    """Loads the batches of a dataset, in order, on worker threads.

    Parameters
    ----------
    dataset : PyDataset or PyIterableDataset
        Where samples come from. Datasets of torch and Hugging Face are taken as they are; `PyDataset.of` and
        `PyIterableDataset.of` wrap anything else. One that is iterated is read in its own order: `shuffle`, `sampler`,
        `batch_sampler`, `items_in_parallel` and `serial_dataset` are not for it.
    batch_size : int or None
        Samples in a batch, > 0. None: no batches but single samples; `collate_fn` gets the sample.
    prefetch_depth : int
        How far ahead of the consumer workers may load, > 0: at most ``num_workers + prefetch_depth`` batches are in
        progress or waiting. Without effect when `num_workers` is 0, or `prefetch_factor` is given.
    shuffle : bool
        A new random order every epoch. Exclusive with `sampler`.
    sampler : iterable of int, optional
        The indices of an epoch, iterated at the start of each. One with a length is read whole then; one without is
        read up to 65,536 indices then and on demand beyond, so that it may be endless.
    num_workers : int
        Batches loaded in parallel, >= 0; with 0 the calling thread loads each batch when it is asked for.
    collate_fn : callable, optional
        ``collate_fn(list of samples) -> batch``; runs on the worker that finished the batch, perhaps beside others that
        collate other batches (with 0 workers on the calling thread). Without it a batch is the list. `default_collate`
        makes NumPy arrays; ``"torch"`` stands for torch's own, which is imported then.
    drop_last : bool
        Leave out a last batch that is smaller than `batch_size`.
    seed : int, optional
        For ``shuffle=True`` only, ``0 <= seed < 2**64``: same seed, same sequence of epoch orders, for any number of
        workers, on every machine and version of Python. Without it every loader has orders of its own.
    items_in_parallel : int
        Items of one batch fetched at once, > 0, each by one ``__getitem__`` call (``__getitems__`` is not used when
        it is more than 1), so that ``num_workers * items_in_parallel`` requests are in flight. Threads with nothing
        left to do in a batch whose last items are under way begin the next one.
    batch_sampler : iterable of iterables of int, optional
        The indices of each batch, of any number; iterated at the start of each epoch, and drawn from batch by batch,
        as far ahead as workers may load. In place of `batch_size` (1 or None then, and None afterwards), `shuffle`,
        `sampler` and `drop_last`.
    timeout : float
        Seconds to wait for a batch of the workers, >= 0; 0 is for ever. ``next()`` then raises a `BatchTimeoutError`,
        which is both a TimeoutError and a RuntimeError and tells which worker is stuck at what; the next one goes on
        waiting for the same batch. Needs workers.
    in_order : bool
        False: batches come in the order in which workers are done with them.
    across_epochs : bool
        Workers go on into the next epoch when they have no more to begin in this one; both together are loaded ahead no
        further than one. So ``iter(loader)`` also asks for the length and the order of the epoch after the one that it
        starts, takes a copy of the context for it, and draws from a `generator`. (Not with a sampler that is an
        iterator or has a ``set_epoch``: then it has no effect.) What was prepared is dropped if the length of the
        dataset or sampler is another by then, or after ``set_epoch``, which also is the way to tell that data have
        changed. Without effect when `num_workers` is 0.
    defer_refcount : bool
        On free-threaded CPython 3.14 and newer: let the interpreter defer the reference counts of `dataset` and
        `collate_fn`, without which workers slow each other down. The two are then freed by the garbage collector
        only, not when their last reference goes. Without effect elsewhere.
    adaptive : bool
        Keep workers parked for as long as fewer of them get more items done, which the loader tries out from time to
        time; `num_workers` and `items_in_parallel` are then a ceiling. Items that wait for each other are held up by
        it for a few milliseconds, or for some tenths of a second if threads compute meanwhile. With False all workers
        take part always.
    generator : numpy.random.Generator, random.Random or torch.Generator, optional
        Where the orders of ``shuffle=True`` come from, instead of `seed`: every ``iter(loader)`` draws one 64-bit
        number from it, so that its state after an epoch does not depend on the workers. Unused without `shuffle`.
    prefetch_factor : int, optional
        The way of torch to say how far workers load ahead, > 0: at most ``prefetch_factor * num_workers`` batches are
        in progress or waiting. Exclusive with any `prefetch_depth` but the default. Without effect when `num_workers`
        is 0.
    persistent_workers : bool
        Without effect: workers always live as long as the loader.
    multiprocessing_context : str or multiprocessing context, optional
        Without effect: there are no processes.
    pin_memory : bool
        Copy tensors, and what else has a method ``pin_memory()``, to page-locked memory, in containers of any depth,
        on the worker, after `collate_fn`. Where there is no device that could fetch from there, batches stay as they
        are, with one warning in the life of the process.
    pin_memory_device : str
        Without effect.
    serial_dataset : bool, optional
        Ask the dataset for one item (or, with ``__getitems__``, one batch) at a time, for data that threads cannot read
        side by side, as a file that is moved with ``seek``. All loaders of one dataset object share that lock, whose
        holder may ask again. ``collate_fn``, ``__len__`` and the consumer do not need it. None asks the dataset's
        attribute of the same name.
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
    ``iter(loader)`` starts an epoch: the k-th call is epoch k, finished or not, unless ``set_epoch`` was called.
    Threads start at the first one, and serve all further epochs. *Thread safety.* Any thread may start epochs; they
    share the workers fairly.

    Each argument can be read under its name, and cannot be set. A copy, deep copy or pickle carries the arguments, not
    the threads, and starts at epoch 0. ``len(loader)`` is the number of batches of an epoch; it is a TypeError where a
    sampler or stream does not say how long it is.

    Up to 65,536 indices ``shuffle=True`` is the shuffle of Fisher and Yates [1]_, beyond it a Feistel permutation of
    eight rounds [2]_ whose cycles are walked until an index is below the length [3]_. The random numbers of both are
    those of SplitMix64 [4]_.

    References
    ----------
    .. [1] D. Knuth: The Art of Computer Programming, volume 2, section 3.4.2, algorithm P.
    .. [2] J. Patarin: "Generic attacks on Feistel schemes", Asiacrypt 2001, on the number of rounds.
    .. [3] J. Black, P. Rogaway: "Ciphers with arbitrary finite domains", CT-RSA 2002.
    .. [4] G. Steele, D. Lea, C. Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014.

    Examples
    --------
    >>> from dataloader_rs import PyDataloader, PyDataset
    >>> loader = PyDataloader(PyDataset.of("abcde"), batch_size=2, num_workers=2)
    >>> list(loader)
    [['a', 'b'], ['c', 'd'], ['e']]
    """

    # For type checkers: the arguments, which cannot be set. What a dataset has beside its items is its own affair.
    dataset: Any
    batch_size: int | None
    prefetch_depth: int
    shuffle: bool
    sampler: Iterable[int] | None
    num_workers: int
    collate_fn: Callable[[Any], B_co] | None
    drop_last: bool
    seed: int | None
    items_in_parallel: int
    batch_sampler: Iterable[Iterable[int]] | None
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
    rng_seed: int
    _given_rng_seed: int | None
    # And what is not an argument, see _prepare.
    _order_seed: int
    _epochs: EpochNumbers
    _reads: Counter
    _ahead: EpochAhead
    _pools: LoaderPools

    # The type of a batch: without collate_fn a list of samples, or, with batch_size=None, the sample. "..." stands for
    # an argument that must be there, after some that need not.

    @overload
    def __init__(
        self: PyDataloader[T, list[T]], dataset: AnyDataset[T], batch_size: int = 1, prefetch_depth: int = 2,
        shuffle: bool = False, sampler: Iterable[int] | None = None, num_workers: int = 0, collate_fn: None = None,
        drop_last: bool = False, seed: int | None = None, items_in_parallel: int = 1, *,
        batch_sampler: BatchSampler | None = None, **options: Unpack[LoaderOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: PyDataloader[T, T], dataset: AnyDataset[T], batch_size: None, prefetch_depth: int = 2,
        shuffle: bool = False, sampler: Iterable[int] | None = None, num_workers: int = 0, collate_fn: None = None,
        drop_last: bool = False, seed: int | None = None, items_in_parallel: int = 1, *,
        batch_sampler: None = None, **options: Unpack[LoaderOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: PyDataloader[T, list[T]], dataset: AnyDataset[T], batch_size: None, prefetch_depth: int = 2,
        shuffle: bool = False, sampler: Iterable[int] | None = None, num_workers: int = 0, collate_fn: None = None,
        drop_last: bool = False, seed: int | None = None, items_in_parallel: int = 1, *,
        batch_sampler: BatchSampler, **options: Unpack[LoaderOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: PyDataloader[T, B], dataset: AnyDataset[T], batch_size: int = 1, prefetch_depth: int = 2,
        shuffle: bool = False, sampler: Iterable[int] | None = None, num_workers: int = 0,
        collate_fn: Callable[[list[T]], B] = ...,
        drop_last: bool = False, seed: int | None = None, items_in_parallel: int = 1, *,
        batch_sampler: BatchSampler | None = None, **options: Unpack[LoaderOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: PyDataloader[T, B], dataset: AnyDataset[T], batch_size: None, prefetch_depth: int = 2,
        shuffle: bool = False, sampler: Iterable[int] | None = None, num_workers: int = 0,
        collate_fn: Callable[[T], B] = ...,
        drop_last: bool = False, seed: int | None = None, items_in_parallel: int = 1, *,
        batch_sampler: None = None, **options: Unpack[LoaderOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: PyDataloader[T, B], dataset: AnyDataset[T], batch_size: None, prefetch_depth: int = 2,
        shuffle: bool = False, sampler: Iterable[int] | None = None, num_workers: int = 0,
        collate_fn: Callable[[list[T]], B] = ...,
        drop_last: bool = False, seed: int | None = None, items_in_parallel: int = 1, *,
        batch_sampler: BatchSampler, **options: Unpack[LoaderOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: PyDataloader[T, Any], dataset: AnyDataset[T], batch_size: int | None = 1, prefetch_depth: int = 2,
        shuffle: bool = False, sampler: Iterable[int] | None = None, num_workers: int = 0,
        collate_fn: Literal["torch"] = ...,
        drop_last: bool = False, seed: int | None = None, items_in_parallel: int = 1, *,
        batch_sampler: BatchSampler | None = None, **options: Unpack[LoaderOptions],
    ) -> None: ...
    def __init__(
        self,
        dataset: PyDataset[Any] | PyIterableDataset[Any] | Any,
        batch_size: int | None = 1,
        prefetch_depth: int = 2,
        shuffle: bool = False,
        sampler: Iterable[int] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | str | None = None,
        drop_last: bool = False,
        seed: int | None = None,
        items_in_parallel: int = 1,
        *,
        batch_sampler: Iterable[Iterable[int]] | None = None,
        timeout: float = 0,
        in_order: bool = True,
        across_epochs: bool = False,
        defer_refcount: bool = True,
        adaptive: bool = True,
        generator: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        multiprocessing_context: Any = None,
        pin_memory: bool = False,
        pin_memory_device: str = "",
        serial_dataset: bool | None = None,
        worker_init_fn: Callable[[int], object] | None = None,
        worker_exit_fn: Callable[[int], object] | None = None,
        rng_seed: int | None = None,
    ) -> None:
        dataset = checked_dataset(dataset)
        if batch_size is not None:
            batch_size = checked_count("batch_size", batch_size, least=1)
        prefetch_depth = checked_count("prefetch_depth", prefetch_depth, least=1)
        num_workers = checked_count("num_workers", num_workers, least=0)
        items_in_parallel = checked_count("items_in_parallel", items_in_parallel, least=1)
        shuffle = checked_flag("shuffle", shuffle)
        drop_last = checked_flag("drop_last", drop_last)
        defer_refcount = checked_flag("defer_refcount", defer_refcount)
        adaptive = checked_flag("adaptive", adaptive)
        in_order = checked_flag("in_order", in_order)
        across_epochs = checked_flag("across_epochs", across_epochs)
        seconds = checked_seconds("timeout", timeout)
        if type(timeout) is not int:
            timeout = seconds  # which was checked: an object might come to something else the next time
        if generator is not None:
            generator = checked_generator(generator)
        if prefetch_factor is not None:
            prefetch_factor = checked_prefetch_factor(prefetch_factor, prefetch_depth)
        persistent_workers = checked_flag("persistent_workers", persistent_workers)
        if multiprocessing_context is not None:
            multiprocessing_context = checked_multiprocessing_context(multiprocessing_context)
        pin_memory_device = checked_device("pin_memory_device", pin_memory_device)
        if serial_dataset is not None:
            serial_dataset = checked_flag("serial_dataset", serial_dataset)
        if seed is not None:
            seed = checked_integer("seed", seed)
        collate_fn = resolve_collate(collate_fn)
        pin_memory = checked_flag("pin_memory", pin_memory)
        check_callable("worker_init_fn", worker_init_fn)
        check_callable("worker_exit_fn", worker_exit_fn)
        if sampler is not None and not is_iterable(sampler):
            raise TypeError(f"sampler must be an iterable of indices or None, got {shown(sampler)}")
        if batch_sampler is not None:
            if not is_iterable(batch_sampler):
                raise TypeError(f"batch_sampler must be an iterable of iterables of indices or None, "
                                f"got {shown(batch_sampler)}")
            check_exclusive("batch_sampler", batch_sampler, batch_size=None if batch_size == 1 else batch_size,
                            shuffle=shuffle, sampler=sampler, drop_last=drop_last)
            batch_size = None
        elif batch_size is None and drop_last:
            raise ValueError("drop_last needs batches, got drop_last=True with batch_size=None")
        if is_stream(dataset):
            _check_stream(shuffle=shuffle, sampler=sampler, batch_sampler=batch_sampler, serial_dataset=serial_dataset,
                          across_epochs=across_epochs,
                          items_in_parallel=None if items_in_parallel == 1 else items_in_parallel)
        if max(num_workers, 1) * items_in_parallel > MAX_THREADS:
            raise ValueError(f"num_workers * items_in_parallel must be <= {MAX_THREADS} threads, "
                             f"got {shown(num_workers)} * {shown(items_in_parallel)}")
        if shuffle:
            check_exclusive("shuffle", shuffle, sampler=sampler)
        if seconds > 0 and num_workers == 0:
            raise ValueError(f"timeout needs num_workers > 0, got timeout={shown(timeout)} with num_workers=0")
        if seed is not None:
            if not shuffle:
                raise ValueError(f"seed needs shuffle=True, got seed={shown(seed)} with shuffle=False")
            seed = checked_uint64("seed", seed)
            check_exclusive("seed", seed, generator=generator)
        if rng_seed is not None:
            rng_seed = checked_uint64("rng_seed", rng_seed)
        vars(self).update(
            dataset=dataset, batch_size=batch_size, prefetch_depth=prefetch_depth, shuffle=shuffle, sampler=sampler,
            num_workers=num_workers, collate_fn=collate_fn, drop_last=drop_last, seed=seed,
            items_in_parallel=items_in_parallel, batch_sampler=batch_sampler, timeout=timeout, in_order=in_order,
            across_epochs=across_epochs, defer_refcount=defer_refcount, adaptive=adaptive, generator=generator,
            prefetch_factor=prefetch_factor, persistent_workers=persistent_workers,
            multiprocessing_context=multiprocessing_context, pin_memory=pin_memory, pin_memory_device=pin_memory_device,
            serial_dataset=serial_dataset, worker_init_fn=worker_init_fn, worker_exit_fn=worker_exit_fn,
            _given_rng_seed=rng_seed,
        )
        self._prepare()
        vars(self)["_made_recipe"] = self._new_recipe()  # wrong values are told at once

    def _prepare(self) -> None:
        """Make what is not an argument: it belongs to this object and this process."""
        seed = self.seed if self._given_rng_seed is None else self._given_rng_seed
        # Not one by one: each would go through __setattr__, which costs more than the rest.
        vars(self).update(
            rng_seed=int.from_bytes(os.urandom(8)) if seed is None else seed,
            _order_seed=int.from_bytes(os.urandom(8)) if self.seed is None else self.seed,
            _epochs=EpochNumbers(), _reads=Counter(), _ahead=EpochAhead(), _pools=LoaderPools(),
        )
        if is_stream(self.dataset):
            self._length_check = LengthCheck(self.dataset)

    @property
    def _recipe(self) -> Recipe:
        # A duplicate makes it when it is first needed: if its dataset holds the loader, that may come after it.
        made: Recipe | None = vars(self).get("_made_recipe")
        return vars(self).setdefault("_made_recipe", self._new_recipe()) if made is None else made

    def _new_recipe(self) -> Recipe:
        batch_size = 1 if self.batch_size is None else min(self.batch_size, MAX_COUNT)
        asked, fetch_many = indexed_object(self.dataset), fetch_many_of(self.dataset)
        if is_serial(asked, self.serial_dataset):
            asked = serial_proxy_of(asked)
            fetch_many = None if fetch_many is None else asked.serialized(fetch_many)
        collate_fn = self.collate_fn
        if self.pin_memory:
            from dataloader_rs.pinning import pinned_collate

            collate_fn = pinned_collate(collate_fn)
        prefetch_depth = self.prefetch_depth
        if self.prefetch_factor is not None:
            prefetch_depth = depth_of_prefetch_factor(self.prefetch_factor, self.num_workers)
        return Recipe(
            asked, fetch_many, collate_fn, batch_size if self.batch_sampler is None else 0, self.num_workers,
            min(prefetch_depth, MAX_COUNT), self.items_in_parallel, self.defer_refcount, self.rng_seed,
            batched=self.batch_size is not None or self.batch_sampler is not None, drop_last=self.drop_last,
            in_order=self.in_order, timeout=float(self.timeout),
        )

    def __iter__(self) -> PyDataloaderIter[B_co]:
        pools = self._pools.here()
        while True:
            pool = pools.started(self._recipe.num_threads, self.adaptive, self._new_crew)
            pool.check_caller()
            crew = pool.crew
            if crew is None or crew.has_started:
                break
            # Held until the iterator does: what worker_init_fn raises is kept for those who wait.
            start = crew.expect()
            if start is not None:
                break
            pools.forget(pool)
        try:
            if is_stream(self.dataset):
                return self._start_stream(pool)
            if self.across_epochs and self.num_workers > 0 and self._may_be_read_early():
                length = _known_length(self._sized())
                return self._ahead.next(pool, length, self._epochs.take, functools.partial(self._start, pool))
            return self._start(pool, self._epochs.take)[0]
        except StopIteration as error:
            # A caller that is an iterator itself would take it for its own end.
            raise not_the_end(error) from error

    def __len__(self) -> int:
        if self.batch_sampler is not None:
            return _sampler_length("batch_sampler", self.batch_sampler)
        if self.sampler is not None:
            num_items = _sampler_length("sampler", self.sampler)
        else:
            num_items = len(self.dataset)
        batch_size = 1 if self.batch_size is None else self.batch_size
        return num_items // batch_size if self.drop_last else -(-num_items // batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch that the next ``iter(loader)`` starts; later ones go on from there.

        With `shuffle`, number and `seed` decide the order (with `generator`, they do not), so a run that is taken up
        again in epoch k sees the orders that it would have seen. The number is passed on to the ``set_epoch`` of the
        sampler and of the dataset, if they have one. Epochs under way keep theirs.

        Parameters
        ----------
        epoch : int
            ``0 <= epoch < 2**64``.

        Raises
        ------
        TypeError, ValueError
            If `epoch` is no such number.

        Examples
        --------
        >>> from dataloader_rs import PyDataloader, PyDataset
        >>> loader = PyDataloader(PyDataset.of("abcde"), batch_size=5, shuffle=True, seed=0)
        >>> first = list(loader)
        >>> loader.set_epoch(0)
        >>> list(loader) == first
        True
        """
        epoch = checked_uint64("epoch", epoch)
        for receiver in (*self._samplers(), indexed_object(self.dataset)):
            tell_epoch(receiver, epoch)
        self._ahead.discard(lambda: self._epochs.set(epoch))

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
        self._ahead.release()

    def __class_getitem__(cls, parameters: Any) -> Any:
        # As for type checkers, B may be left out; a subclass has parameters of its own.
        if cls is PyDataloader:
            if not isinstance(parameters, tuple):
                parameters = (parameters,)
            if len(parameters) == 1:
                from typing import Any  # that of hints.py is no more than an object

                parameters = (*parameters, Any)
            if len(parameters) != 2:
                raise TypeError(f"PyDataloader takes one parameter or two, got {len(parameters)}")
        generic: Any = super()
        return generic.__class_getitem__(parameters)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        # Without rng_seed, which never is its default: a loader rebuilt from the attributes of another looks the same.
        given = [f"{name}={shown(getattr(self, name))}" for name, default in DEFAULTS.items()
                 if name != "rng_seed" and getattr(self, name) is not default]
        return f"{type_name(self)}({', '.join([dataset_name(self.dataset), *given])})"

    def __setattr__(self, name: str, value: object) -> None:
        if name in ARGUMENTS and "_pools" in vars(self):
            raise AttributeError(f"{name} is an argument of the loader and cannot be set: make a new PyDataloader")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in ARGUMENTS and "_pools" in vars(self):
            raise AttributeError(f"{name} is an argument of the loader and cannot be deleted")
        super().__delattr__(name)

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

    def _start_stream(self, pool: WorkerPool) -> PyDataloaderIter[B_co]:
        readers = readers_of(self.dataset, self.num_workers)
        expected = _known_length(self.dataset)
        epoch = self._epochs.take()
        on_end = functools.partial(self._length_check.check, expected)
        return start_stream(self._recipe, pool, readers, expected, on_end, epoch)

    def _sized(self) -> object:
        """What says how long an epoch is."""
        if self.batch_sampler is not None:
            return self.batch_sampler
        return self.dataset if self.sampler is None else self.sampler

    def _samplers(self) -> tuple[object, ...]:
        """Whatever the order comes from."""
        return self.sampler, self.batch_sampler, getattr(self.batch_sampler, "sampler", None)

    def _may_be_used_up(self) -> bool:
        """Whether the order comes from an iterator, which only one epoch can read."""
        return is_iterator(self.sampler) or is_iterator(self.batch_sampler)

    def _may_be_read_early(self) -> bool:
        """Whether the order of an epoch can be asked for before the epoch: not where it has to be told the epoch."""
        return not self._may_be_used_up() and not any(map(is_told_epochs, self._samplers()))

    def _start(self, pool: WorkerPool, take_epoch: Callable[[], int],
               after: PyDataloaderIter[B_co] | None = None) -> tuple[PyDataloaderIter[B_co], int]:
        """Start an epoch over indices. Its iterator and its number."""
        indices, num_items, stream, epoch = self._order(take_epoch)
        return start_epoch(self._recipe, pool, indices, num_items, stream, epoch, after), epoch

    def _order(self, take_epoch: Callable[[], int]) -> tuple[Any, int, IndexStream | BatchStream | None, int]:
        """Indices of an epoch, how many of them make up batches, where further ones come from; its number."""
        stream: IndexStream | BatchStream | None = None
        indices: Any
        if self.batch_sampler is not None:
            is_again = self._reads.take() > 0
            return [], 0, BatchStream(self.batch_sampler, is_again and self._may_be_used_up()), take_epoch()
        length: int | None
        if self.sampler is None:
            length = len(self.dataset)
            epoch = take_epoch()
            if not self.shuffle:
                indices = range(length)
            elif self.generator is None:
                indices = ShuffledOrder(length, self._order_seed, epoch)
            else:
                indices = ShuffledOrder(length, draw_key(self.generator), 0)
        else:
            length = _known_length(self.sampler)
            stream = IndexStream(self.sampler, self._recipe.batch_size, self.drop_last, length or 0)
            indices, is_empty = stream.head, stream.is_empty
            if stream.ended:
                stream = None
            epoch = take_epoch()
            if self._reads.take() > 0 and is_empty and (length or self._may_be_used_up()):
                warn_of_nothing("sampler", self.sampler, stacklevel=5)
        num_items = len(indices)
        if self.drop_last:
            num_items -= num_items % self._recipe.batch_size
        return indices, num_items, stream, epoch


def _defaults_of(function: Any) -> dict[str, Any]:
    """The arguments that have a default, in order. Importing `inspect` would take as long as all of this package."""
    by_position = function.__code__.co_varnames[:function.__code__.co_argcount]
    return {**dict(zip(by_position[-len(function.__defaults__):], function.__defaults__, strict=True)),
            **function.__kwdefaults__}


DEFAULTS = _defaults_of(PyDataloader.__init__)
ARGUMENTS = frozenset(DEFAULTS) | {"dataset"}
RUNTIME = frozenset({"rng_seed", "_made_recipe", "_order_seed", "_epochs", "_reads", "_pools", "_ahead",
                     "_length_check"})


def _check_stream(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise ValueError(f"{name} is not for an iterable dataset, which is read one sample after the other "
                             f"in its own order: got {name}={shown(value)}")


def _known_length(sized: Any) -> int | None:
    """How long a sampler or stream says it is. Some have a ``__len__`` only to say that they do not know."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def _sampler_length(name: str, sampler: Any) -> int:
    try:
        return len(sampler)
    except NotImplementedError as error:
        raise TypeError(f"{name} {shown(sampler)} does not say how long it is") from error
