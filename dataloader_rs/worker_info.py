"""What a worker knows of itself, and the functions of the user that it calls when it starts and when it ends. Knows no
epochs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from dataloader_rs._core import current_worker, process_generation
from dataloader_rs.dataset import indexed_object
from dataloader_rs.errors import explain_start, not_the_end
from dataloader_rs.hints import Any, NamedTuple
from dataloader_rs.randomness import worker_seed


class WorkerInfo(NamedTuple):
    """What `get_worker_info` returns.

    Attributes
    ----------
    id : int
        Number of the worker, from 0; below `num_threads`.
    num_workers : int
        Of the loader.
    num_threads : int
        ``num_workers * items_in_parallel``, how many workers there are.
    seed : int
        Keyed by the loader's ``rng_seed`` and `id`, ``0 <= seed < 2**64``. The same in every epoch of the loader. No
        two workers of a loader have the same, nor the same modulo 2**32, which is what ``numpy.random.seed`` takes.
    dataset : object
        The loader's.
    """

    id: int
    num_workers: int
    num_threads: int
    seed: int
    dataset: Any


def get_worker_info() -> WorkerInfo | None:
    """What the calling thread is, if it is a worker of a loader.

    Returns
    -------
    WorkerInfo or None
        On a worker: in ``__getitem__``, ``__getitems__``, ``collate_fn``, ``worker_init_fn`` and ``worker_exit_fn``.
        None on all other threads, on those that user code starts on a worker too. With ``num_workers=0`` there are no
        workers: it is None everywhere, also on the threads that ``items_in_parallel`` asks for.

    Notes
    -----
    Where an item iterates another loader, what that one calls on its own workers is told of those. If it has none, its
    dataset runs on the worker of the outer loader, and is told of that one.

    The rules are those of ``torch.utils.data.get_worker_info``, but that `seed` does not change with the epoch.

    A result that is kept in a `threading.local` keeps the dataset alive for as long as the worker lives; and if the
    dataset knows its loader, that is for ever.

    Examples
    --------
    >>> from dataloader_rs import PyDataloader, PyDataset, get_worker_info
    >>> class Workers(PyDataset):
    ...     def __len__(self):
    ...         return 2
    ...     def __getitem__(self, index):
    ...         return get_worker_info().num_workers
    >>> list(PyDataloader(Workers(), num_workers=3)), get_worker_info()
    ([[3], [3]], None)
    """
    found = current_worker()
    if found is None:
        return None
    crew, number = found
    return crew.info(number)


class Start:
    """How the workers of a crew start, as those who wait for it are told.

    Notes
    -----
    *Thread safety.* Workers write under the lock of the crew, before they set `settled`.
    """

    def __init__(self) -> None:
        self.errors: dict[int, BaseException] = {}
        # Set once all have started, or one could not.
        self.settled: threading.Event = threading.Event()

    def wait(self, seconds: float) -> bool:
        """Wait until it is settled, or for so long. False if time is up."""
        return self.settled.wait(seconds)

    @property
    def error(self) -> BaseException | None:
        """What the init function raised; where it did on several workers, on the one with the lowest number."""
        errors = dict(self.errors)
        return errors[min(errors)] if errors else None


class Crew:
    """The workers of one pool.

    Parameters
    ----------
    dataset : object
    num_workers, num_threads : int
    rng_seed : int
        What their seeds are keyed by.
    init_function, exit_function : callable or None
        Called with the number of a worker, on that worker.

    Notes
    -----
    *Thread safety.* Workers call `start`, consumers `expect`; any thread may do so at any time.

    Once it was raised, what the init function raised leads to the loader, and so to this object. Therefore it belongs
    to those who wait for the start, and goes when the last of them has raised it or was dropped: see NOTE [ errors and
    frames ] in sampler.py.
    """

    def __init__(self, dataset: object, num_workers: int, num_threads: int, rng_seed: int,
                 init_function: Callable[[int], object] | None, exit_function: Callable[[int], object] | None) -> None:
        self._dataset: Callable[[], object] = lambda: dataset
        # Without functions the dataset is asked for in calls only, where the epoch keeps it alive. So a thread that is
        # slow to start or to end does not keep it from being freed. (An adapter is not what the epoch keeps.)
        if init_function is None and exit_function is None and indexed_object(dataset) is dataset:
            try:
                self._dataset = weakref.ref(dataset)
            except TypeError:
                pass  # it takes no weak references
        self._num_workers = num_workers
        self._num_threads = num_threads
        self._rng_seed = rng_seed
        self._init_function = init_function
        self._exit_function = exit_function
        self._generation = process_generation()
        # One that a thread may take twice: a signal handler or the garbage collector may start an epoch meanwhile.
        self._lock = threading.RLock()
        # Guarded by `_lock`.
        self._started: set[int] = set()
        self._failed = False
        # Kept here for the first who waits, and after that known for as long as somebody does.
        self._unclaimed: Start | None = Start()
        self._known: Callable[[], Start | None] = weakref.ref(self._unclaimed)
        # Whether each worker has to start, and to end, also if there is nothing for it to do.
        self.has_functions: bool = init_function is not None or exit_function is not None
        # Whether all workers have started: there is nothing to wait for, and nothing failed.
        self.has_started: bool = init_function is None

    def info(self, worker: int) -> WorkerInfo | None:
        """What `get_worker_info` says on this worker."""
        if self._generation != process_generation():
            return None  # a worker forked, and is the main thread of the child
        return WorkerInfo(worker, self._num_workers, self._num_threads, worker_seed(self._rng_seed, worker),
                          self._dataset())

    def start(self, worker: int) -> bool:
        """Call the init function on this worker. Can it work?"""
        try:
            if self._init_function is not None:
                self._init_function(worker)
        except BaseException as raised:
            # The frame of this call is in the traceback: it must not lead back to the exception.
            self._fail(worker, raised)
            return False
        with self._lock:
            self._started.add(worker)
            if len(self._started) == self._num_threads:
                self.has_started = True
                start = self._known()
                if start is not None:
                    start.settled.set()
        return True

    def _fail(self, worker: int, raised: BaseException) -> None:
        error = not_the_end(raised)
        explain_start(error, worker)
        with self._lock:
            self._failed = True
            start = self._known()
            if start is not None:
                start.errors[worker] = error
                start.settled.set()

    def exit_function(self, worker: int) -> Callable[[int], object] | None:
        """What this worker is to call now that it ends: nothing if it could not start."""
        return self._exit_function if worker in self._started else None

    def expect(self) -> Start | None:
        """What tells how the workers start; all who wait at the same time get the same.

        None if one of them failed, and all who were to know that do.
        """
        with self._lock:
            while True:
                known = self._known
                start, self._unclaimed = known(), None
                if start is not None or self._failed:
                    return start
                start = Start()
                reference = weakref.ref(start)
                if self._known is known:  # else a call inside this one was faster
                    self._known = reference
                    if self.has_started:
                        start.settled.set()
                    return start
