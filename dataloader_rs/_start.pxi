# How an epoch is started.

import sys
from array import array

from cpython.object cimport PyObject
from libc.stdint cimport UINT64_MAX, uint64_t


# A batch sampler is drawn from at iter() as far as workers may fetch ahead, and no further than this.
cdef uint64_t DRAWN_AHEAD = 1024


def start_epoch(Recipe recipe not None, WorkerPool pool not None, source, uint64_t num_items, stream,
                uint64_t epoch_number, PyDataloaderIter after=None):
    """Start an epoch over indices and return its iterator.

    Parameters
    ----------
    recipe : Recipe
    pool : WorkerPool
        With ``recipe.num_threads`` threads.
    source : range, ShuffledOrder, array('q') or list
        Indices of the first `num_items` items. Never changed from here on. Empty where batches have sizes of their own.
    num_items : int
        How many of them make up batches; without a stream the last batch may be short.
    stream : object or None
        ``stream.draw()`` returns a list of further batches (lists of indices; only the last of all may be short, where
        the batch size is given) and sets ``stream.ended``, and ``stream.error`` to what ended it early or None.
    epoch_number : int
        What the random numbers of samples are keyed by, beside `recipe` and their position.
    after : PyDataloaderIter or None
        Of the same recipe and pool, with workers, that nobody has begun to iterate yet: workers go on with this epoch
        when they have no more to begin in that one, and the two together are fetched ahead no further than one.

    Raises
    ------
    RuntimeError, MemoryError
    """
    cdef _Epoch epoch = _Epoch.__new__(_Epoch)
    cdef PyDataloaderIter iterator
    if num_items > <uint64_t>len(source):
        raise ValueError(f"num_items must be <= {len(source)}, the length of source, got {num_items}")
    if after is not None:
        check_goes_on(after, recipe, pool)
    iterator = new_iterator(recipe, pool, epoch)
    iterator.num_items = num_items
    if recipe.batch_size > 0:
        iterator.num_batches = num_items // recipe.batch_size + (num_items % recipe.batch_size != 0)
    iterator.complete = stream is None
    iterator.stream = stream

    epoch.number = epoch_number
    epoch.source = source
    epoch.source_is_range = type(source) is range
    epoch.source_is_array = type(source) is array
    epoch.source_batches = UINT64_MAX if stream is None else iterator.num_batches
    epoch.drawn = {}
    epoch.drawn_from = {}
    start(iterator, 0, NULL if after is None else after.epoch.epoch_ptr)
    if recipe.num_workers == 0:
        return iterator
    iterator.offer(iterator.num_batches)
    if recipe.batch_size == 0:
        # The first next() draws one more.
        for _ in range(min(recipe.capacity - 1, DRAWN_AHEAD)):
            if iterator.complete:
                break
            iterator.draw()
    return iterator


def start_stream(Recipe recipe not None, WorkerPool pool not None, list readers not None, num_items, on_end,
                 uint64_t epoch_number):
    """Start an epoch over a stream and return its iterator.

    Parameters
    ----------
    recipe : Recipe
        Without items in parallel.
    pool : WorkerPool
        With ``recipe.num_threads`` threads.
    readers : list of iterator
        Of samples: one, or with workers perhaps more, whose batches come in turns.
    num_items : int or None
        How many samples they are said to give.
    on_end : callable
        ``on_end(number of samples)``, called when they have ended without an error.
    epoch_number : int
        What random numbers are keyed by, beside `recipe`.

    Raises
    ------
    RuntimeError, MemoryError
    """
    cdef _Epoch epoch = _Epoch.__new__(_Epoch)
    cdef PyDataloaderIter iterator = new_iterator(recipe, pool, epoch)
    if any(reader is None for reader in readers):
        raise TypeError("readers must be iterators, got None, which stands for one that has ended")
    if not readers or recipe.batch_size == 0 or recipe.items_in_parallel > 1:
        raise ValueError(f"a stream needs a reader, a batch_size > 0 and items_in_parallel=1, got {len(readers)} "
                         f"readers, batch_size={recipe.batch_size}, items_in_parallel={recipe.items_in_parallel}")
    if num_items is not None:
        iterator.num_batches = num_items // recipe.batch_size
        if not recipe.drop_last and num_items % recipe.batch_size != 0:
            iterator.num_batches += 1
    # Each shard ends with a batch of its own, so their number is not known before.
    iterator.complete = num_items is not None and len(readers) == 1
    iterator.on_end = on_end
    epoch.readers = readers
    epoch.number = epoch_number
    start(iterator, len(readers), NULL)
    if recipe.num_workers > 0:
        dlrs_epoch_offer(epoch.epoch_ptr, UINT64_MAX, True)
    return iterator


cdef int check_goes_on(PyDataloaderIter after, Recipe recipe, WorkerPool pool) except -1:
    if (not after.active or after.taken > 0 or after.is_followed or after.pool is not pool
            or after.epoch.recipe is not recipe or after.epoch.epoch_ptr == NULL or recipe.num_workers == 0):
        raise ValueError("after must be a new iterator of the same recipe and pool, with workers, and not be followed")
    after.is_followed = True
    return 0


cdef PyDataloaderIter new_iterator(Recipe recipe, WorkerPool pool, _Epoch epoch):
    cdef PyDataloaderIter iterator = PyDataloaderIter.__new__(PyDataloaderIter)
    cdef PyObject *current = dlrs_get_current_epoch()
    if pool.num_threads != recipe.num_threads:
        raise ValueError(f"pool must have {recipe.num_threads} threads, got {pool.num_threads}")
    iterator.pool = pool
    if pool.crew is not None and not pool.crew.has_started:
        iterator.start = pool.crew.expect()
    iterator.epoch = epoch
    epoch.recipe = recipe
    epoch.context = PyContext_CopyCurrent()
    epoch.contexts = [PyContext_Copy(epoch.context) for _ in range(recipe.num_threads)]
    epoch.array_type = getattr(sys.modules.get("numpy"), "ndarray", None)
    epoch.generation = pool.generation
    epoch.pools = (<_Epoch>current).pools if current != NULL else frozenset()
    if pool.pool_id != 0:
        epoch.pools |= {pool.pool_id}
    return iterator


cdef int start(PyDataloaderIter iterator, uint64_t num_lanes, dlrs_epoch *after) except -1:
    cdef Recipe recipe = iterator.epoch.recipe
    cdef WorkerPool pool = iterator.pool
    cdef dlrs_epoch_options options
    cdef dlrs_status status
    if pool.pool_ptr != NULL:
        options.batch_size = recipe.batch_size
        options.capacity = recipe.capacity
        options.batches_in_parallel = recipe.num_workers if recipe.num_workers > 0 else 1
        options.items_in_parallel = recipe.items_in_parallel
        options.num_lanes = num_lanes
        options.unordered = not recipe.in_order
        options.after = after
        status = dlrs_epoch_new(pool.pool_ptr, &options, <void *>iterator.epoch, &iterator.epoch.epoch_ptr)
        if status == DLRS_NO_MEMORY:
            raise MemoryError("no memory for the reorder buffer of an epoch")
        if status != DLRS_OK:
            raise RuntimeError("the process was forked while an epoch was started")
    iterator.active = 1
    return 0
