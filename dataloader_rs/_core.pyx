# cython: language_level=3, freethreading_compatible=True
"""The bridge between the C pool and Python.

Here are thread states, the references that slots of the reorder buffer hold, C status to exception, and the
iterator: one extension, whose parts are the files that are included below. Arguments are checked in ``loader.py``; what
order the indices come in is decided in ``sampler.py`` and ``_shuffle.pyx``; threads, locks and waiting are
behind ``_pool.h``.

NOTE [ who holds what ] The loader holds a `Recipe` and a `WorkerPool`. An iterator holds its `_Epoch` and the
`WorkerPool`. Workers know the `_Epoch` alone, by a borrowed pointer in the C epoch: it stays good because the iterator
holds the `_Epoch`, and an iterator that goes while workers are in its epoch leaves them a reference, which the last of
them drops. A worker claims a run only once it is attached, and takes a reference of its own before anybody else can
run Python, so the garbage collector never finishes off a dataset whose items are about to be fetched. So dropping the
iterator ends the epoch at once and nobody waits. What workers read is set once, before they can see it, and never
cleared (`no_gc_clear`): the collector may take a cycle apart while a worker is still in it.
"""
cimport cython
from libc.stdint cimport uint64_t

from dataloader_rs._bridge cimport *
from dataloader_rs._pool cimport *

if PyInterpreterState_Get() != PyInterpreterState_Main():
    raise ImportError("dataloader_rs works in the main interpreter only")

# A waiting consumer looks for signals this often; so does whoever waits for workers to end.
cdef uint64_t SIGNAL_CHECK_NS = 50_000_000


def process_generation():
    """Number of forks that led to this process; threads made under another number are not there."""
    return dlrs_process_generation()


@cython.final
cdef class Counter:
    """Counts from 0; any thread may ask, and no two get the same number."""

    cdef uint64_t count

    def take(self):
        """The next number."""
        return dlrs_fetch_add(&self.count, 1)


include "_recipe.pxi"
include "_outcome.pxi"
include "_epoch.pxi"
include "_worker.pxi"
include "_request.pxi"
include "_worker_pool.pxi"
include "_fork.pxi"
include "_iterator.pxi"
include "_start.pxi"


# These two are nobody else's: what is in their fields is trusted.
del globals()["_Failure"], globals()["_Epoch"]
