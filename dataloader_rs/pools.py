"""The worker pool of a loader in this process: started when it is first needed, and anew after close() or a fork."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dataloader_rs._core import WorkerPool, process_generation, stack_size
from dataloader_rs.threads import import_what_shows_errors
from dataloader_rs.worker_info import Crew


def _nobody() -> None:
    """The crew of threads that need to know nothing of themselves."""


class PoolOfProcess:
    """At most one pool that can be used at a time.

    Notes
    -----
    *Thread safety.* Any thread may call. The lock is one that a thread may take twice, because the garbage collector or
    a signal handler may run user code that starts an epoch of the same loader while a pool is made.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pool: WorkerPool | None = None

    def started(self, num_threads: int, adaptive: bool, new_crew: Callable[[], Crew | None] = _nobody) -> WorkerPool:
        """The pool, with its threads running; each pool has a crew of its own.

        Raises
        ------
        RuntimeError
            If the system starts no more threads, or on a worker of a pool that has ended.
        """
        if self._pool is None and num_threads > 0:
            import_what_shows_errors()
        with self._lock:
            pool = self._pool
            if pool is None or not pool.usable:
                if pool is not None:
                    pool.check_caller()
                made = WorkerPool(num_threads, stack_size(), adaptive, new_crew())
                pool = self._pool
                if pool is None or not pool.usable:
                    pool = self._pool = made
        # Without the lock: threads that did start may be in user code that waits for it.
        pool.check_started()
        return pool

    def forget(self, pool: WorkerPool) -> None:
        """Start another than this one, which has failed, when one is needed."""
        with self._lock:
            if self._pool is pool:
                self._pool = None

    def close(self) -> None:
        """End the threads, if there are any, and wait for it."""
        with self._lock:
            pool = self._pool
        if pool is not None:
            pool.close()


class LoaderPools:
    """The pool of a loader in each process that has used it: a forked child never touches that of its parent."""

    def __init__(self) -> None:
        self._of_process: dict[int, PoolOfProcess] = {}

    def here(self) -> PoolOfProcess:
        """The one of this process; its lock cannot be held by a thread of the parent."""
        return self._of_process.setdefault(process_generation(), PoolOfProcess())
