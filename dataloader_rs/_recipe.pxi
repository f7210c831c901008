# What all epochs of one loader have in common.

cimport cython
from libc.stdint cimport INT64_MAX, UINT64_MAX, uint64_t

from dataloader_rs.fetch import fetch_run_for


# More than any machine has: the most threads of one pool.
MAX_THREADS = 65_536


@cython.final
@cython.no_gc_clear
cdef class Recipe:
    """What all epochs of one loader have in common: where samples come from, and what becomes of them.

    Parameters
    ----------
    dataset : object
        What is asked ``dataset[index]``.
    fetch_many : callable or None
        ``fetch_many(list of int) -> iterable of samples``, used for whole batches instead of single items.
    collate_fn : callable or None
    batch_size : int
        1 .. 2**63 - 1; or 0 if each batch has a size of its own.
    num_workers, prefetch_depth, items_in_parallel : int
        As checked by the loader; the first two are at most 2**63 - 1.
    defer_refcount : bool
        Whether to defer the reference counting of the three objects, see ``_freethreading.h``.
    rng_seed : int
        What the random numbers of samples are keyed by, beside epoch and position.
    batched : bool
        False: a batch is its one sample, not a list of it.
    drop_last : bool
        For streams: leave out a last batch that is smaller than `batch_size`.
    in_order : bool
        False: batches come in the order in which they get ready.
    timeout : float
        How long to wait for a batch of the workers, in seconds; 0 is for ever.
    """

    cdef object dataset
    cdef object fetch_many
    cdef object collate_fn
    cdef object fetch_run
    cdef readonly uint64_t batch_size
    cdef uint64_t capacity
    cdef uint64_t num_workers
    cdef uint64_t items_in_parallel
    cdef bint batched
    cdef bint drop_last
    cdef bint in_order
    cdef double timeout
    cdef readonly unsigned num_threads
    cdef uint64_t rng_seed

    def __cinit__(self, dataset, fetch_many, collate_fn, uint64_t batch_size, uint64_t num_workers,
                  uint64_t prefetch_depth, uint64_t items_in_parallel, bint defer_refcount, uint64_t rng_seed, *,
                  bint batched=True, bint drop_last=False, bint in_order=True, double timeout=0):
        check_threads(num_workers, items_in_parallel)
        if items_in_parallel == 0:
            raise ValueError("items_in_parallel must be > 0, got 0")
        if batch_size > <uint64_t>INT64_MAX:
            raise ValueError(f"batch_size must be < 2**63, got {batch_size}")
        self.dataset = dataset
        self.fetch_many = fetch_many if items_in_parallel == 1 and batched else None
        self.collate_fn = collate_fn
        self.fetch_run = fetch_run_for(dataset)
        self.batch_size = batch_size
        self.batched = batched
        self.drop_last = drop_last
        self.in_order = in_order
        self.timeout = timeout
        self.num_workers = num_workers
        self.items_in_parallel = items_in_parallel
        self.rng_seed = rng_seed
        # Without workers nothing is fetched ahead: there may be a pool, for the items of the caller's own batch.
        self.capacity = 1
        if num_workers > 0:
            self.capacity = num_workers + min(prefetch_depth, UINT64_MAX - num_workers)
        if num_workers > 0:
            self.num_threads = num_workers * items_in_parallel
        elif items_in_parallel > 1:
            self.num_threads = items_in_parallel
        if defer_refcount:
            dlrs_defer_refcount(dataset)
            dlrs_defer_refcount(fetch_many)
            dlrs_defer_refcount(collate_fn)

    def __reduce__(self):
        raise TypeError("a Recipe is made anew, not pickled")


cdef int check_threads(uint64_t num_workers, uint64_t items_in_parallel) except -1:
    # Each of them first, because the product might not fit.
    cdef uint64_t most = MAX_THREADS
    cdef uint64_t batches = num_workers if num_workers > 0 else 1
    if batches > most or items_in_parallel > most or batches * items_in_parallel > most:
        raise ValueError(f"num_workers * items_in_parallel must be <= {MAX_THREADS} threads, "
                         f"got {num_workers} * {items_in_parallel}")
    return 0
