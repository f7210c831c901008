# cython: language_level=3, freethreading_compatible=True
"""The bridge between the C pool and Python.

Here are thread states, the references that slots of the reorder buffer hold, C status to exception, and the
iterator. Arguments are checked in ``loader.py``; what order the indices come in is decided in ``sampler.py`` and
``_shuffle.pyx``; threads, locks and waiting are in ``_pool.c``.

NOTE [ who holds what ] The loader holds a `Recipe` and a `WorkerPool`. An iterator holds its `_Epoch` and the
`WorkerPool`. Workers know the `_Epoch` alone, by a borrowed pointer in the C epoch: it stays good because the iterator
holds the `_Epoch`, and an iterator that goes while workers are in its epoch leaves them a reference, which the last of
them drops. A worker claims a run only once it is attached, and takes a reference of its own before anybody else can
run Python, so the garbage collector never finishes off a dataset whose items are about to be fetched. So dropping the
iterator ends the epoch at once and nobody waits. What workers read is set once, before they can see it, and never
cleared (`no_gc_clear`): the collector may take a cycle apart while a worker is still in it.
"""
import atexit
import os
import sys
import threading
from array import array
from itertools import islice
from types import GenericAlias

cimport cython
from cpython.exc cimport PyErr_CheckSignals, PyErr_WriteUnraisable
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport INT64_MAX, UINT64_MAX, int64_t, uint64_t
from libc.string cimport strerror

from dataloader_rs._pool cimport *
from dataloader_rs._shuffle cimport ShuffledOrder

from dataloader_rs.errors import explain, explain_stream, interrupted, not_the_end
from dataloader_rs.fetch import fetch_run_for
from dataloader_rs.stuck import start_timeout_error, timeout_error
from dataloader_rs.threads import adopt_thread, forget_thread, hold_for_fork, release_in_child, release_in_parent


cdef extern from "_bridge.h":
    ctypedef struct PyInterpreterState:
        pass

    ctypedef struct dlrs_python:
        PyInterpreterState *interpreter
        bint (*start)(dlrs_worker *worker, PyObject *crew) noexcept
        void (*work)(dlrs_worker *worker, const dlrs_run *run) noexcept
        void (*end)(dlrs_worker *worker, PyObject *crew) noexcept

    dlrs_python *dlrs_python_new(const dlrs_python *hooks, PyObject *crew, unsigned num_threads)
    void dlrs_python_free(dlrs_python *python)
    void dlrs_python_leave(dlrs_python *python)
    dlrs_hooks dlrs_python_hooks(dlrs_python *python)
    PyObject *dlrs_get_current_crew()
    unsigned dlrs_get_current_worker()
    void dlrs_set_current_crew(PyObject *crew, unsigned worker)

    enum:
        DLRS_ASKED_NOTHING
        DLRS_ASKED_ITEMS
        DLRS_ASKED_MANY
        DLRS_ASKED_COLLATE

    ctypedef struct dlrs_place:
        PyObject *epoch
        PyObject *iterator
        uint64_t first
        uint64_t count
        PyObject *generators
        int asked

    dlrs_place *dlrs_get_place()
    dlrs_place *dlrs_get_worker_place()
    void dlrs_enter_place(dlrs_place *place, PyObject *epoch)
    void dlrs_leave_place(dlrs_place *place)
    void dlrs_ask(dlrs_place *place, int asked, PyObject *iterator, uint64_t first, uint64_t count)
    void dlrs_ask_nothing(dlrs_place *place)

    uint64_t dlrs_get_current_pool()
    PyObject *dlrs_get_current_epoch()
    void dlrs_set_current_epoch(PyObject *epoch)
    void dlrs_hold_new_states() nogil
    void dlrs_release_new_states()
    void dlrs_show_slots_to_collector(object type, dlrs_epoch *(*epoch_of)(PyObject *self) noexcept)
    int dlrs_raise(object error) except -1
    uint64_t dlrs_load(const uint64_t *field)
    void dlrs_store(uint64_t *field, uint64_t value)
    uint64_t dlrs_fetch_add(uint64_t *field, uint64_t value)
    bint dlrs_try_set(uint64_t *flag)
    PyObject *dlrs_fetch(PyObject *fetch, PyObject *dataset, PyObject *run)
    PyObject *dlrs_take_raised()

cdef extern from "_platform.h" nogil:
    uint64_t dlrs_now_ns()

cdef extern from "_freethreading.h":
    void dlrs_defer_refcount(object obj)
    void dlrs_disown(PyObject *batch, PyObject *array_type)

cdef extern from "Python.h":
    PyInterpreterState *PyInterpreterState_Get()
    PyInterpreterState *PyInterpreterState_Main()
    void PyException_SetCause(object error, PyObject *cause)
    object PyContext_CopyCurrent()
    object PyContext_Copy(object context)
    int PyContext_Enter(object context) except -1
    int PyContext_Exit(object context) except -1
    PyObject *PyObject_CallOneArg(PyObject *function, PyObject *argument)
    PyObject *PyObject_GetItem(PyObject *obj, PyObject *key)
    Py_ssize_t PyObject_LengthHint(object obj, Py_ssize_t default) except -1


if PyInterpreterState_Get() != PyInterpreterState_Main():
    raise ImportError("dataloader_rs works in the main interpreter only")

# More than any machine has: the most threads of one pool.
MAX_THREADS = 65_536

# A waiting consumer looks for signals this often; so does whoever waits for workers to end.
cdef uint64_t SIGNAL_CHECK_NS = 50_000_000

# How long the end of the process waits for workers that are inside Python, in pieces of SIGNAL_CHECK_NS.
cdef int EXIT_CHECKS = 20

# Longer lists of indices are cut in the note of an error.
cdef uint64_t NOTED_INDICES = 100

# A batch sampler is drawn from at iter() as far as workers may fetch ahead, and no further than this.
cdef uint64_t DRAWN_AHEAD = 1024


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


# ---- outcomes ----

@cython.final
@cython.no_gc_clear
cdef class _Failure:
    """Stands in a slot for a batch that failed: the exception, and where it came from."""

    cdef object error
    cdef int64_t position   # of the item in its batch; -1 when the batch failed as a whole
    cdef int64_t worker     # its number; -1 for the calling thread
    cdef int64_t samples_lost   # that a stream had given for this batch before it failed; -1 if it did not fail

    @staticmethod
    cdef _Failure of(error, int64_t position):
        cdef _Failure failure = _Failure.__new__(_Failure)
        failure.error = error
        failure.position = position
        failure.worker = failure.samples_lost = -1
        return failure


# A worker must leave an outcome even when there is no memory to make one.
cdef _Failure OUT_OF_MEMORY = _Failure.of(MemoryError("no memory for the outcome of a batch"), -1)


# Stands in a slot that no batch came to: a part of a stream had ended before.
cdef object NOTHING = object()


cdef object failure_or_out_of_memory(error):
    try:
        return _Failure.of(error, -1)
    except BaseException:
        return OUT_OF_MEMORY


cdef inline object owned(PyObject *reference):
    # The object, from a reference that is ours.
    cdef object result = <object>reference
    Py_DECREF(result)
    return result


cdef _Failure failure_of_taken(PyObject *error, int64_t position):
    # What stands in the slot for an exception that was taken by `dlrs_take_raised`.
    return OUT_OF_MEMORY if error == NULL else _Failure.of(owned(error), position)


cdef inline object outcome_of_call(PyObject *result, int64_t position):
    # What a C call has returned, or a `_Failure` for the exception that it has left.
    return failure_of_taken(dlrs_take_raised(), position) if result == NULL else owned(result)


cdef int64_t asked_position(iterator, uint64_t count) noexcept:
    # The fetch function draws the index from `iterator` just before it asks for the item, so what is left in there
    # says which item was asked for. -1 if none was.
    cdef Py_ssize_t left
    try:
        left = PyObject_LengthHint(iterator, 0)
    except BaseException:
        return -1
    return <int64_t>count - left - 1


cdef list checked_samples(samples, uint64_t count):
    # A copy, as the dataset may keep its own. An iterable that does not end is too long as well, and is not read for
    # ever to find that out.
    cdef uint64_t most = 2 * count + 1000
    cdef list result
    if type(samples) is list and <uint64_t>len(samples) == count:
        result = (<list>samples)[:]
    else:
        result = list(islice(samples, most))
    if <uint64_t>len(result) != count:
        raise ValueError(f"__getitems__ must return one sample for each index: got "
                         f"{'at least ' if <uint64_t>len(result) == most else ''}{len(result)} samples "
                         f"for {count} indices")
    return result


# ---- the epoch ----

@cython.final
@cython.no_gc_clear
cdef class _Epoch:
    """One pass over the dataset, as workers see it.

    All fields are set before workers can see it, but for `epoch_ptr`, which whoever frees what it points to sets to
    NULL, and for what is in `drawn`, whose entries the consumer adds before it offers them.
    """

    cdef Recipe recipe
    cdef object source              # the indices, in order, of the batches 0 .. source_batches - 1
    cdef bint source_is_range
    cdef bint source_is_array
    cdef uint64_t source_batches
    cdef dict drawn                 # number of a later batch: list of its indices; the consumer adds and removes
    cdef dict drawn_from            # for batches with sizes of their own, the same: positions of their first items
    cdef list readers               # of a stream: the iterator of each lane, None once it has ended; else None
    cdef uint64_t num_read          # samples of a stream
    cdef object context             # what was current at iter(); the calling thread works in it itself
    cdef list contexts              # a copy for each worker
    cdef object array_type          # numpy.ndarray if NumPy is there, for dlrs_disown; else None
    cdef frozenset pools            # numbers of the pools whose workers wait for this epoch, and its own
    cdef uint64_t generation
    cdef uint64_t number            # of the epoch
    cdef dlrs_epoch *epoch_ptr      # NULL when the calling thread does the work; else the iterator's, and workers'

    cdef object indices(self, uint64_t batch, uint64_t position, uint64_t count):
        """The indices of `count` items of a batch from `position` on: a range, or a fresh list."""
        cdef uint64_t first
        if batch >= self.source_batches:
            return self.drawn[batch][position:position + count]
        first = batch * self.recipe.batch_size + position
        if self.source_is_range:
            return range(first, first + count)
        if self.source_is_array:
            return self.source[first:first + count].tolist()
        if isinstance(self.source, ShuffledOrder):
            return (<ShuffledOrder>self.source).piece(first, count)
        return self.source[first:first + count]

    cdef object index_at(self, uint64_t batch, uint64_t position):
        """The index of one item of a batch."""
        cdef uint64_t at
        if batch >= self.source_batches:
            return self.drawn[batch][position]
        at = batch * self.recipe.batch_size + position
        if self.source_is_range:
            return at
        if isinstance(self.source, ShuffledOrder):
            return (<ShuffledOrder>self.source).piece(at, 1)[0]
        return self.source[at]

    cdef uint64_t first_position(self, uint64_t batch) except? -1:
        """The position in the epoch of the first item of a batch."""
        if self.recipe.batch_size == 0:
            return self.drawn_from[batch]
        return batch * self.recipe.batch_size

    cdef object make_batch(self, dlrs_worker *worker, dlrs_place *place, uint64_t batch, uint64_t count):
        """Fetch a whole batch one item after the other. The batch, or a `_Failure` in its place.

        `worker` is NULL on the calling thread.
        """
        cdef object samples
        if self.recipe.fetch_many is not None:
            dlrs_ask(place, DLRS_ASKED_MANY, NULL, self.first_position(batch), count)
            samples = self.fetch_many(batch, count)
        elif count == 1:
            dlrs_ask(place, DLRS_ASKED_ITEMS, NULL, self.first_position(batch), 1)
            samples = self.make_item(batch, 0)
            if self.recipe.batched and type(samples) is not _Failure:
                samples = [samples]
        else:
            samples = self.fetch(worker, place, batch, count)
            place.asked = DLRS_ASKED_NOTHING    # its iterator is gone
        return samples if type(samples) is _Failure else self.collated_by(worker, place, batch, samples)

    cdef object read(self, uint64_t lane, bint *ended):
        """Read the samples of one batch of a stream: a list, or a `_Failure`, or None when there are no more.

        `ended`: whether the lane came to its end by this.
        """
        cdef list samples = []
        cdef _Failure failure
        cdef object reader = self.readers[lane]
        ended[0] = False
        if reader is None:
            return None
        try:
            samples.extend(islice(reader, self.recipe.batch_size))
        except BaseException as error:
            failure = _Failure.of(error, -1)
            failure.samples_lost = len(samples)
            return failure
        dlrs_fetch_add(&self.num_read, <uint64_t>len(samples))
        if <uint64_t>len(samples) < self.recipe.batch_size:
            ended[0] = True
            self.readers[lane] = None
            if not samples or self.recipe.drop_last:
                return None
        return samples

    cdef object read_on_worker(self, dlrs_worker *worker, dlrs_place *place, const dlrs_run *run):
        """The next batch of a stream, or a `_Failure`, or NOTHING; others may read on before it is collated."""
        cdef bint ended = False
        cdef bint failed = True
        cdef object samples
        try:
            samples = self.read(run.batch % <uint64_t>len(self.readers), &ended)
            failed = type(samples) is _Failure
        finally:
            dlrs_worker_leave_lane(worker, run, ended, failed)
        return self.made_of(place, run.batch, samples)

    cdef object made_of(self, dlrs_place *place, uint64_t batch, samples):
        if samples is None:
            return NOTHING
        if type(samples) is _Failure:
            return samples
        return self.collated(place, batch, samples if self.recipe.batched else samples[0])

    cdef object fetch_many(self, uint64_t batch, uint64_t count):
        cdef list indices = list(self.indices(batch, 0, count))
        cdef object samples = outcome_of_call(
            PyObject_CallOneArg(<PyObject *>self.recipe.fetch_many, <PyObject *>indices), -1)
        if type(samples) is _Failure:
            return samples
        try:
            return checked_samples(samples, count)
        except BaseException as error:
            return _Failure.of(error, -1)

    cdef object fetch(self, dlrs_worker *worker, dlrs_place *place, uint64_t batch, uint64_t count):
        cdef object iterator = iter(self.indices(batch, 0, count))
        cdef object run = iterator
        cdef list samples = None
        cdef PyObject *fetched
        cdef PyObject *error
        cdef int64_t position
        cdef uint64_t left = count
        cdef uint64_t piece = count if worker == NULL else dlrs_worker_piece(worker, 0, count)
        dlrs_ask(place, DLRS_ASKED_ITEMS, <PyObject *>iterator, self.first_position(batch), count)
        while True:
            if piece < count:
                run = islice(iterator, piece)
            fetched = dlrs_fetch(<PyObject *>self.recipe.fetch_run, <PyObject *>self.recipe.dataset, <PyObject *>run)
            if fetched == NULL:
                error = dlrs_take_raised()
                position = asked_position(iterator, count)
                place.asked = DLRS_ASKED_NOTHING    # what dies now asks for nothing
                return failure_of_taken(error, position)
            if piece == count:
                return owned(fetched)
            if samples is None:
                samples = owned(fetched)
            else:
                samples += owned(fetched)
            left -= piece
            piece = dlrs_worker_piece(worker, piece, left)
            if left == 0:
                return samples
            dlrs_worker_let_consumers_pass(worker)

    cdef object collated(self, dlrs_place *place, uint64_t batch, samples):
        if self.recipe.collate_fn is None:
            return samples
        dlrs_ask(place, DLRS_ASKED_COLLATE, NULL, batch, 1)
        return outcome_of_call(PyObject_CallOneArg(<PyObject *>self.recipe.collate_fn, <PyObject *>samples), -1)

    cdef object collated_by(self, dlrs_worker *worker, dlrs_place *place, uint64_t batch, samples):
        # Without workers, the threads that fetch items leave collate_fn to the calling thread, which has no `worker`.
        if worker != NULL and self.recipe.num_workers == 0:
            return samples
        return self.collated(place, batch, samples)

    cdef object make_item(self, uint64_t batch, uint64_t position):
        """Fetch one item. The sample, or a `_Failure` in its place."""
        cdef object index = self.index_at(batch, position)
        return outcome_of_call(PyObject_GetItem(<PyObject *>self.recipe.dataset, <PyObject *>index), position)

    cdef object gather(self, dlrs_worker *worker, const dlrs_run *run):
        """Make the outcome of a batch from the results of its items, all of which this thread owns now."""
        cdef dlrs_slot *slot = run.slot
        cdef list samples = []
        cdef uint64_t i
        cdef object outcome
        try:
            for i in range(slot.started):
                samples.append(<object>slot.results[i])
            if slot.failed_at != DLRS_NO_ITEM:
                return samples[slot.failed_at]
        finally:
            for i in range(slot.started):
                Py_DECREF(<object>slot.results[i])
        if not dlrs_run_is_wanted(run):
            return None
        outcome = samples if self.recipe.batched else samples[0]
        return self.collated_by(worker, dlrs_get_worker_place(), run.batch, outcome)

    cdef object run_outcome(self, dlrs_worker *worker, const dlrs_run *run):
        """Do a run on a worker: the batch, or the sample if the run is a single item, or a `_Failure`."""
        cdef dlrs_place *place = dlrs_get_worker_place()  # a greenlet may have left another one around
        try:
            if run.singly:
                dlrs_ask(place, DLRS_ASKED_ITEMS, NULL, self.first_position(run.batch) + run.position, 1)
                outcome = self.make_item(run.batch, run.position)
                dlrs_ask_nothing(place)
            elif self.readers is not None:
                outcome = self.read_on_worker(worker, place, run)
            else:
                outcome = self.make_batch(worker, place, run.batch, run.batch_items)
        except MemoryError:
            return OUT_OF_MEMORY
        except BaseException as error:
            outcome = failure_or_out_of_memory(error)
        sign(outcome, worker)
        return outcome

    cdef object batch_outcome(self, dlrs_worker *worker, const dlrs_run *run):
        """Finish a batch whose items were fetched singly: the batch, or a `_Failure`."""
        try:
            outcome = self.gather(worker, run)
        except BaseException:
            return OUT_OF_MEMORY
        sign(outcome, worker)
        return outcome

    cdef PyObject *work(self, dlrs_worker *worker, const dlrs_run *run) noexcept:
        """Do a run on a worker. The one reference to the outcome of its batch, or NULL if the batch goes on."""
        cdef PyObject *result = new_reference(self.run_outcome(worker, run))
        self.disown(result)
        if not run.singly:
            return result
        if not dlrs_worker_finish_item(run, result, type(<object>result) is _Failure):
            return NULL
        result = new_reference(self.batch_outcome(worker, run))
        self.disown(result)
        return result

    cdef inline void disown(self, PyObject *outcome) noexcept:
        # The traceback of an exception will lead to the loader. If this thread still owned the exception when the
        # consumer drops it, the loader would wait for this thread to run, and this thread for work, or for the end of
        # the loader.
        if type(<object>outcome) is _Failure:
            dlrs_disown(<PyObject *>(<_Failure>outcome).error, <PyObject *>self.array_type)
        dlrs_disown(outcome, <PyObject *>self.array_type)


cdef dlrs_epoch *epoch_of(PyObject *self) noexcept:
    return (<_Epoch>self).epoch_ptr


dlrs_show_slots_to_collector(_Epoch, epoch_of)


cdef void sign(outcome, dlrs_worker *worker) noexcept:
    # Put the worker's number on a failure that has none yet.
    if type(outcome) is _Failure and outcome is not OUT_OF_MEMORY and (<_Failure>outcome).worker < 0:
        (<_Failure>outcome).worker = dlrs_worker_index(worker)


cdef inline PyObject *new_reference(obj) noexcept:
    Py_INCREF(obj)
    return <PyObject *>obj


# ---- the worker ----

cdef bint on_start(dlrs_worker *worker, PyObject *crew) noexcept:
    try:
        adopt_thread(dlrs_worker_name(worker).decode("ascii"))
    except MemoryError:
        pass    # a worker works without a name
    if crew == NULL:
        return True
    dlrs_set_current_crew(crew, dlrs_worker_index(worker))
    try:
        return (<object>crew).start(dlrs_worker_index(worker))
    except BaseException:
        return False    # no memory for keeping the user's error, either


cdef void on_end(dlrs_worker *worker, PyObject *crew) noexcept:
    if crew != NULL:
        end_in_crew(<object>crew, dlrs_worker_index(worker))
        dlrs_set_current_crew(NULL, 0)
    try:
        forget_thread()
    except MemoryError:
        pass


cdef void end_in_crew(crew, unsigned worker) noexcept:
    # Call worker_exit_fn. Nobody waits for what it raises.
    cdef object number
    cdef object function
    cdef PyObject *result
    try:
        number = worker
        function = crew.exit_function(number)
    except BaseException:
        return
    if function is None:
        return
    result = PyObject_CallOneArg(<PyObject *>function, <PyObject *>number)
    if result == NULL:
        PyErr_WriteUnraisable(function)
    else:
        Py_DECREF(<object>result)


cdef void on_work(dlrs_worker *worker, const dlrs_run *first) noexcept:
    cdef dlrs_run run = first[0]
    while work_for_epoch(worker, &run):
        pass


cdef bint work_for_epoch(dlrs_worker *worker, dlrs_run *run) noexcept:
    # Do runs for as long as they are of one epoch. Is there a run, of another?
    cdef _Epoch epoch = <_Epoch>run.user
    cdef object context = epoch.contexts[dlrs_worker_index(worker)]
    cdef PyObject *outcome
    cdef void *unwanted
    cdef dlrs_epoch *orphan
    cdef bint more = True
    cdef dlrs_place *place = dlrs_get_worker_place()
    enter_context(context)
    dlrs_set_current_epoch(<PyObject *>epoch)
    dlrs_enter_place(place, <PyObject *>epoch)
    while more and run.user == <void *>epoch:
        dlrs_worker_let_consumers_pass(worker)
        outcome = epoch.work(worker, run)
        dlrs_ask_nothing(place)
        more = dlrs_worker_next(worker, run, outcome, &unwanted, &orphan)
        if unwanted != NULL:
            Py_DECREF(<object>unwanted)
        if orphan != NULL:
            # The iterator is gone, and what it left to the workers is ours to drop.
            epoch.epoch_ptr = NULL
            dlrs_epoch_free(orphan)
            Py_DECREF(epoch)
    dlrs_leave_place(place)
    dlrs_set_current_epoch(NULL)
    leave_context(context)
    return more


cdef void enter_context(context) noexcept:
    try:
        PyContext_Enter(context)
    except RuntimeError:
        pass    # native code of the user entered a context and did not leave it, see leave_context


cdef void leave_context(context) noexcept:
    try:
        PyContext_Exit(context)
    except RuntimeError:
        pass    # the same; the runs must go on


cdef dlrs_python python
python.interpreter = PyInterpreterState_Get()
python.start = on_start
python.work = on_work
python.end = on_end


# ---- what the calling thread is, and what it is asked for ----

def current_worker():
    """The crew that the calling thread belongs to and its number there, or None if it is no worker of a crew."""
    cdef PyObject *crew = dlrs_get_current_crew()
    if crew == NULL:
        return None
    return <object>crew, dlrs_get_current_worker()


def current_request():
    """What a loader asks the calling thread for at this moment, or None if it is nothing.

    Returns
    -------
    tuple or None
        What kind of call it is (``ASKED_ITEM``, ``ASKED_MANY`` or ``ASKED_COLLATE``); the position in the epoch of the
        item, or of the first of many, or for ``collate_fn`` the number of the batch; how many items; a dict that lasts
        as long as the call, or as a run of calls for single items; the loader's rng_seed; the number of the epoch.
    """
    cdef dlrs_place *place = dlrs_get_place()
    cdef int64_t item = 0
    cdef _Epoch epoch
    if place == NULL or place.asked == DLRS_ASKED_NOTHING:
        return None
    if place.iterator != NULL:
        item = asked_position(<object>place.iterator, place.count)
        if item < 0:
            return None
    if place.generators == NULL:
        place.generators = new_reference({})
    epoch = <_Epoch>place.epoch
    return (place.asked, place.first + <uint64_t>item, place.count if place.iterator == NULL else 1,
            <object>place.generators, epoch.recipe.rng_seed, epoch.number)


ASKED_ITEM = DLRS_ASKED_ITEMS
ASKED_MANY = DLRS_ASKED_MANY
ASKED_COLLATE = DLRS_ASKED_COLLATE


# ---- the pool ----

cdef bint on_worker_of(uint64_t pool_id) except -1:
    # Is the calling thread a worker of that pool, or works, perhaps through loaders inside loaders, for one?
    cdef PyObject *current = dlrs_get_current_epoch()
    if pool_id == 0:
        return False
    if pool_id == dlrs_get_current_pool():
        return True
    if current == NULL or (<_Epoch>current).generation != dlrs_process_generation():
        return False
    return pool_id in (<_Epoch>current).pools


def _always():
    return True


cdef object exiting(what):
    # What to raise when there are no workers any more because the interpreter exits. A thread that is still in a loop
    # then is a daemon thread, which ends without a word; the interpreter would stop it a moment later anyway.
    if threading.current_thread() is threading.main_thread():
        return RuntimeError(f"{what}: the interpreter is exiting")
    return SystemExit()


@cython.final
cdef class WorkerPool:
    """The worker threads of a loader, or, with 0 threads, only the token that says whether it was closed.

    If the system starts no more threads, it is made all the same, not usable, and `check_started` tells.

    Parameters
    ----------
    num_threads : int
    stack_size : int
        Of each thread, in bytes.
    adaptive : bool
        Whether to keep workers parked that only get in each other's way.
    crew : Crew or None
        What its workers know of themselves and call when they start and end.

    Raises
    ------
    RuntimeError
        If the interpreter is exiting.
    SystemExit
        If the interpreter is exiting, on a daemon thread.
    MemoryError

    Notes
    -----
    Making it waits for nobody. Dropping it lets the threads end after what they are at, and waits for none of them.
    Thread safe.
    """

    cdef dlrs_pool *pool_ptr
    cdef dlrs_python *python_ptr    # the workers' and ours; NULL once we have left it
    cdef readonly object crew
    cdef uint64_t pool_id       # 0 without threads
    cdef readonly unsigned num_threads
    cdef readonly uint64_t generation
    cdef uint64_t closed
    cdef int start_error        # number of the system's error that kept a thread from starting, or 0

    def __cinit__(self, unsigned num_threads, size_t stack_size, bint adaptive, crew):
        cdef dlrs_pool_options options
        cdef dlrs_python *shared
        cdef dlrs_status status
        check_threads(num_threads, 1)
        self.generation = dlrs_process_generation()
        self.num_threads = num_threads
        self.crew = crew
        if num_threads == 0:
            return
        options.num_threads = num_threads
        options.stack_size = stack_size
        options.exclusive = getattr(sys, "_is_gil_enabled", _always)()
        options.adaptive = adaptive
        shared = dlrs_python_new(&python, NULL if crew is None else <PyObject *>crew, num_threads)
        if shared == NULL:
            raise MemoryError(f"no memory for {num_threads} worker threads")
        options.hooks = dlrs_python_hooks(shared)
        with nogil:
            status = dlrs_pool_new(&options, &self.pool_ptr, &self.start_error)
        if self.pool_ptr != NULL:
            self.python_ptr = shared
            self.pool_id = dlrs_pool_id(self.pool_ptr)
            return
        dlrs_python_free(shared)
        if status == DLRS_NO_MEMORY:
            raise MemoryError(f"no memory for {num_threads} worker threads")
        raise exiting("cannot start worker threads")

    def __del__(self):
        # Not in __dealloc__: the workers that end now may call functions of the user, and the collector, which calls
        # this first, leaves alone what they still need. See NOTE [ who holds the crew ].
        cdef dlrs_python *left = self.python_ptr
        if left == NULL or self.generation != dlrs_process_generation():
            return
        self.python_ptr = NULL
        dlrs_store(&self.closed, 1)
        dlrs_pool_stop(self.pool_ptr)
        if self.crew is not None:
            Py_INCREF(self.crew)
        dlrs_python_leave(left)

    def __dealloc__(self):
        if self.pool_ptr != NULL:
            dlrs_pool_release(self.pool_ptr)

    def __reduce__(self):
        raise TypeError("threads cannot be pickled")

    @property
    def usable(self):
        """Whether epochs can be started on it: not closed, not failed, and not the parent process's."""
        if self.generation != dlrs_process_generation() or dlrs_load(&self.closed):
            return False
        return self.pool_ptr == NULL or dlrs_pool_is_usable(self.pool_ptr)

    def check_started(self):
        """Raise a RuntimeError if a thread could not be started, once those that did start have ended.

        Ctrl-C ends the wait. They may be in ``worker_init_fn``, so the caller must not hold what that could ask for.
        """
        if self.start_error == 0:
            return
        self.wait()
        raise RuntimeError(f"cannot start {self.num_threads} worker threads (num_workers * items_in_parallel): "
                           f"{strerror(self.start_error).decode('utf-8', 'replace')}")

    def check_caller(self):
        """Raise a RuntimeError on a worker of this pool, for which its epoch would wait."""
        if on_worker_of(self.pool_id):
            raise RuntimeError("a loader cannot be iterated by its own worker, which the epoch would wait for: "
                               "use another loader, or num_workers=0 for the inner one")

    def close(self):
        """Let the threads end after what they are at, and wait for it. Ctrl-C ends the wait.

        Raises
        ------
        RuntimeError
            On one of these threads, which cannot wait for itself.
        """
        if on_worker_of(self.pool_id):
            raise RuntimeError("a loader cannot be closed by its own worker")
        dlrs_store(&self.closed, 1)
        if self.pool_ptr == NULL:
            return
        dlrs_pool_stop(self.pool_ptr)
        self.wait()

    cdef int wait(self) except -1:
        """Wait until all threads of the stopped pool have ended."""
        cdef bint ended = False
        while not ended:
            with nogil:
                ended = dlrs_pool_wait(self.pool_ptr, SIGNAL_CHECK_NS)
            PyErr_CheckSignals()
        return 0


def _stop_all_workers():
    # Once, when the interpreter exits: workers that wait end at once, those inside Python are given a second, and
    # the rest is abandoned, so that a stuck call does not hold up the exit. Nothing is freed under an abandoned
    # thread; it ends, or sleeps for ever, when it next asks for the interpreter.
    cdef bint ended = False
    cdef int _
    with nogil:
        dlrs_process_stop()
    try:
        for _ in range(EXIT_CHECKS):
            with nogil:
                ended = dlrs_process_wait(SIGNAL_CHECK_NS)
            if ended:
                return
            PyErr_CheckSignals()
    except (KeyboardInterrupt, SystemExit):
        return  # Ctrl-C, or a handler that calls sys.exit(): whoever sent it wants the end, and that is near


def _before_fork():
    hold_for_fork()
    with nogil:
        dlrs_hold_new_states()


def _after_fork_in_parent():
    dlrs_release_new_states()
    release_in_parent()


def _after_fork_in_child():
    dlrs_release_new_states()
    release_in_child()


if dlrs_process_prepare() != DLRS_OK:
    raise MemoryError("no memory for a fork handler")
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
atexit.register(_stop_all_workers)


# ---- the iterator ----

@cython.auto_pickle(False)
cdef class PyDataloaderIter:
    """The batches of one epoch, in order. Made by ``iter(loader)``.

    ``len(iterator)`` is the number of batches still to come; a batch that failed counts as delivered. After an
    exception the next ``next()`` goes on with the following batch.

    Notes
    -----
    *Thread safety.* One thread at a time: a ``next()`` while another thread is inside ``next()`` of the same
    iterator is a `RuntimeError`. Dropping it never waits.
    """

    cdef _Epoch epoch
    cdef WorkerPool pool
    cdef object stream          # draws the batches beyond those known at iter(), or None
    cdef object stream_error    # what the stream came to, to be raised after the batches before it
    cdef uint64_t busy          # 1 while a thread is inside next()
    cdef object start           # of the workers, until all of them are known to have started; then None
    cdef uint64_t active        # 1 from the start of the epoch until its end
    cdef uint64_t complete      # 1 once no more batches will be drawn
    cdef uint64_t num_items     # known so far
    cdef uint64_t num_batches   # known so far
    cdef uint64_t offered       # batches that the pool may work on
    cdef uint64_t taken         # batches delivered, or failed
    cdef uint64_t batch         # number of the one that was taken last
    cdef uint64_t drawn_for     # the number of batches that were taken or are being waited for when it was drawn last
    cdef bint is_followed       # workers go on with another epoch after this one
    cdef object on_end          # of a stream: on_end(number of samples that it gave)
    cdef object torn            # of a stream whose batches come in any order: the _Failure that comes after all others
    cdef uint64_t torn_batch
    cdef dlrs_place place       # of the thread that is inside next(), where that makes the batch
    cdef object __weakref__

    __class_getitem__ = classmethod(GenericAlias)

    def __init__(self, *args, **kwargs):
        raise TypeError("a PyDataloaderIter is made by iter(loader)")

    def __reduce__(self):
        raise TypeError("an iterator over batches cannot be copied or pickled")

    def __iter__(self):
        return self

    def __len__(self):
        if dlrs_load(&self.active) and not dlrs_load(&self.complete):
            raise TypeError("the number of batches left is not known: the sampler or stream has no length, "
                            "and its end has not been seen")
        taken = dlrs_load(&self.taken)
        return max(dlrs_load(&self.num_batches), taken) - taken

    def __next__(self):
        if not dlrs_try_set(&self.busy):
            raise RuntimeError("next() is under way on this iterator, in another thread or further up in this one")
        try:
            return self.advance()
        finally:
            dlrs_store(&self.busy, 0)

    def __del__(self):
        # A finalizer finds nobody inside next(); somebody who calls this by hand might.
        if dlrs_try_set(&self.busy):
            try:
                self.finish()
            finally:
                dlrs_store(&self.busy, 0)

    cdef object advance(self):
        cdef object outcome
        if not self.active:
            raise StopIteration
        if self.epoch.readers is not None:
            self.check_usable()
            if self.start is not None:
                self.await_workers()
            outcome = self.next_of_stream()
        else:
            outcome = self.next_of_indices()
        if type(outcome) is _Failure:
            self.fail(<_Failure>outcome)
        self.drop_indices()
        return outcome

    cdef object next_of_indices(self):
        if self.complete and self.taken == self.num_batches:
            self.end()
        self.check_usable()
        if self.start is not None:
            self.await_workers()
        if not self.complete and self.drawn_for != self.taken + 1:
            # Once for each batch: who waits again, after a timeout or Ctrl-C, draws no further.
            self.drawn_for = self.taken + 1
            self.draw()
            if self.complete and self.taken == self.num_batches:
                self.end()
        if self.epoch.epoch_ptr == NULL:
            return self.make()
        if self.epoch.recipe.num_workers == 0:
            return self.take_own()
        if self.offered < self.num_batches:
            self.offer_all()    # there was no memory for it before, and nobody would ever work on them
        return self.take()

    cdef object next_of_stream(self):
        cdef object outcome = NOTHING
        while outcome is NOTHING:
            outcome = self.take() if self.epoch.epoch_ptr != NULL else self.make()
            if (type(outcome) is _Failure and (<_Failure>outcome).samples_lost >= 0 and self.epoch.epoch_ptr != NULL
                    and not self.epoch.recipe.in_order and outcome is not self.torn):
                # The end of the stream, of which batches that were read before are not ready yet. Several shards may
                # fail at once: of those it is the error that comes first in the order.
                if self.torn is None or self.batch < self.torn_batch:
                    self.torn = outcome
                    self.torn_batch = self.batch
                outcome = NOTHING
        return outcome

    cdef int check_usable(self) except -1:
        if self.pool.generation != dlrs_process_generation():
            raise RuntimeError("this iterator was started before a fork, in the parent process: "
                               "start an epoch of your own with iter(loader)")
        if dlrs_load(&self.pool.closed):
            raise RuntimeError("the loader was closed while this iterator was in mid-epoch")
        if self.pool.pool_id != 0 and on_worker_of(self.pool.pool_id):
            raise RuntimeError("a worker cannot wait for a batch of its own loader")
        return 0

    cdef int await_workers(self) except -1:
        """Wait until worker_init_fn has returned on all workers. If it raised on one, that is the end of the epoch."""
        cdef uint64_t began_ns = dlrs_now_ns()
        cdef object timeout = self.epoch.recipe.timeout
        cdef object start = self.start
        while not start.wait(SIGNAL_CHECK_NS * 1e-9) and self.pool.usable:
            self.check_usable()
            if timeout > 0 and 1e-9 * (dlrs_now_ns() - began_ns) >= timeout:
                raise start_timeout_error(timeout)
        self.start = None
        error = start.error
        if error is not None:
            self.end_early()
            return dlrs_raise(error)
        return 0

    cdef void end_early(self) noexcept:
        """End the epoch where nothing more can come: it has no workers and never will, or its stream failed."""
        dlrs_store(&self.complete, 1)
        dlrs_store(&self.num_batches, self.taken)
        self.torn = self.stream_error = None    # see NOTE [ errors and frames ]
        self.finish()

    cdef int draw(self) except -1:
        """Draw one batch's worth of indices from a sampler that goes on beyond what iter() read."""
        cdef object error = None
        cdef uint64_t count
        try:
            for batch in self.stream.draw():
                count = len(batch)
                if self.epoch.recipe.batch_size == 0:
                    self.epoch.drawn_from[self.num_batches] = self.num_items
                self.epoch.drawn[self.num_batches] = batch
                self.num_items += count
                dlrs_store(&self.num_batches, self.num_batches + 1)
        except BaseException as raised:
            error = raised  # what was drawn by then, if anything, is lost, so the epoch cannot go on
        if error is not None or self.stream.ended:
            # Before anything that may find no memory: an epoch that is over has its error.
            if error is None:
                error, self.stream.error = self.stream.error, None
            self.stream_error = error
            dlrs_store(&self.complete, 1)
        if self.epoch.recipe.num_workers > 0:
            self.offer_all()
        # What a sampler raises has its place after the batches that were drawn before it. Ctrl-C cannot wait for its
        # turn; but the sampler may not go on after it, so the epoch must not seem to end well.
        error = self.stream_error
        if error is None or issubclass(type(error), Exception):
            return 0
        self.stream_error = interrupted(error)
        return dlrs_raise(error)

    cdef int offer_all(self) except -1:
        """Let workers work on all batches that are known."""
        self.offer(self.num_batches)
        if self.complete:
            dlrs_epoch_offer(self.epoch.epoch_ptr, 0, True)
        return 0

    cdef int offer(self, uint64_t end) except -1:
        """Let the pool work on all batches before number `end`."""
        cdef uint64_t first = self.offered * self.epoch.recipe.batch_size
        cdef uint64_t last = self.num_items
        while self.epoch.recipe.batch_size == 0 and self.offered < end:
            if dlrs_epoch_offer_batch(self.epoch.epoch_ptr, self.batch_items(self.offered)) == DLRS_NO_MEMORY:
                raise MemoryError("no memory for one more batch of the batch_sampler")
            self.offered += 1
        if end < self.num_batches:
            last = end * self.epoch.recipe.batch_size
        if end > self.offered:
            dlrs_epoch_offer(self.epoch.epoch_ptr, last - first, end == self.num_batches)
            self.offered = end
        return 0

    cdef int end(self) except -1:
        """Raise what comes after the last batch."""
        error, self.stream_error = self.stream_error, None
        self.finish()
        if self.epoch.readers is not None:
            self.num_batches = self.taken
            self.on_end(self.epoch.num_read)
        if error is not None:
            dlrs_raise(not_the_end(error))
        raise StopIteration

    cdef void finish(self) noexcept:
        """End the epoch: what is ready and not taken is dropped, what is under way is dropped when it is done."""
        cdef dlrs_epoch *epoch_ptr
        cdef void *left
        if not self.active:
            return
        dlrs_store(&self.active, 0)
        epoch_ptr = self.epoch.epoch_ptr
        if epoch_ptr == NULL:
            return
        dlrs_epoch_cancel(epoch_ptr)
        left = dlrs_epoch_reclaim(epoch_ptr)
        while left != NULL:
            Py_DECREF(<object>left)
            left = dlrs_epoch_reclaim(epoch_ptr)
        # See NOTE [ who holds what ]: the reference is there before the last worker can be told to drop it.
        Py_INCREF(self.epoch)
        if dlrs_epoch_leave(epoch_ptr):
            self.epoch.epoch_ptr = NULL
            dlrs_epoch_free(epoch_ptr)
            Py_DECREF(self.epoch)

    cdef void count_taken(self, uint64_t batch) noexcept:
        # Together with the C half, before anything can be raised: the two counts must never part.
        dlrs_store(&self.taken, self.taken + 1)
        self.batch = batch

    cdef void drop_indices(self) noexcept:
        if self.stream is not None:
            self.epoch.drawn.pop(self.batch, None)
            self.epoch.drawn_from.pop(self.batch, None)

    cdef uint64_t batch_items(self, uint64_t batch) except? 0:
        if self.epoch.recipe.batch_size == 0:
            return len(self.epoch.drawn[batch])
        return min(self.num_items - batch * self.epoch.recipe.batch_size, self.epoch.recipe.batch_size)

    cdef list noted_indices(self, uint64_t batch, int64_t position):
        """The index at that position of the batch, or, if it is -1, those of its first items."""
        if position >= 0:
            return list(self.epoch.indices(batch, position, 1))
        return list(self.epoch.indices(batch, 0, min(self.batch_items(batch), NOTED_INDICES)))

    cdef int fail(self, _Failure failure) except -1:
        """Raise the exception of the batch that was taken last, with a note that tells where it comes from."""
        cdef uint64_t batch = self.batch
        cdef object error = failure.error
        if failure is OUT_OF_MEMORY:
            error = MemoryError("no memory for the outcome of a batch")
        if failure.samples_lost >= 0:
            self.end_early()    # a stream that failed cannot be read on
        try:
            error = not_the_end(error)
            if self.epoch.readers is not None:
                explain_stream(error, batch, failure.worker, failure.samples_lost)
            else:
                explain(error, self.noted_indices(batch, failure.position), self.batch_items(batch), failure.position,
                        batch, failure.worker)
        except Exception:
            pass    # no memory, or no room on the stack: the error is worth more than the note
        except BaseException as interrupt:
            # Ctrl-C, just here: neither is lost.
            Py_INCREF(error)
            PyException_SetCause(interrupt, <PyObject *>error)
            raise
        finally:
            self.drop_indices()
        if issubclass(type(error), StopIteration):
            error = RuntimeError("a dataset or collate_fn raised StopIteration")
        return dlrs_raise(error)

    cdef object make(self):
        """Make the next batch in the calling thread."""
        cdef uint64_t batch = self.taken
        cdef bint ended
        PyContext_Enter(self.epoch.context)
        dlrs_enter_place(&self.place, <PyObject *>self.epoch)
        try:
            if self.epoch.readers is None:
                self.count_taken(batch)
                return self.epoch.make_batch(NULL, &self.place, batch, self.batch_items(batch))
            samples = self.epoch.read(0, &ended)
            if samples is not None:
                self.count_taken(batch)
                return self.epoch.made_of(&self.place, batch, samples)
        finally:
            dlrs_leave_place(&self.place)
            PyContext_Exit(self.epoch.context)
        self.end()

    cdef object take(self):
        """Wait for the outcome of the next batch, and take it out of the reorder buffer."""
        cdef dlrs_epoch *epoch_ptr = self.epoch.epoch_ptr
        cdef void *outcome = NULL
        cdef uint64_t batch = 0
        cdef dlrs_status status
        cdef double left = self.epoch.recipe.timeout
        cdef uint64_t wait_ns = SIGNAL_CHECK_NS
        cdef uint64_t began_ns = 0
        while True:
            status = dlrs_epoch_take(epoch_ptr, &outcome, &batch)
            if status != DLRS_NOT_READY:
                return self.taken_outcome(status, outcome, batch)
            if self.epoch.recipe.timeout > 0:
                if began_ns == 0:
                    began_ns = dlrs_now_ns()
                left = self.epoch.recipe.timeout - 1e-9 * <double>(dlrs_now_ns() - began_ns)
                if left <= 0:
                    self.raise_timeout()
                wait_ns = SIGNAL_CHECK_NS if left > 1 else min(SIGNAL_CHECK_NS, <uint64_t>(left * 1e9) + 1)
            with nogil:
                status = dlrs_epoch_wait(epoch_ptr, wait_ns)
            dlrs_epoch_attached(epoch_ptr)
            if status == DLRS_NOT_READY:
                PyErr_CheckSignals()
            elif status == DLRS_END:
                if self.torn is None:
                    self.end()
                self.batch = self.torn_batch
                return self.torn

    cdef int raise_timeout(self) except -1:
        """Tell what the batch that does not come waits for; it may be waited for again."""
        cdef unsigned worker = 0
        cdef dlrs_run run
        cdef int64_t position = -1
        cdef object indices = None
        cdef uint64_t num_items = 0
        cdef object timeout = self.epoch.recipe.timeout
        if not dlrs_epoch_find_worker(self.epoch.epoch_ptr, &worker, &run):
            raise timeout_error(timeout)
        if self.epoch.readers is None:
            if run.singly or run.num_items == 1:
                position = run.position
            indices = self.noted_indices(run.batch, position)
            num_items = self.batch_items(run.batch)
        raise timeout_error(timeout, run.batch, indices, num_items, position, worker,
                            f"dlrs-{self.pool.pool_id}-{worker}")

    cdef object take_own(self):
        """The same without workers: threads fetch the items, and the batch is finished in the calling thread.

        What signal handlers raise meanwhile is raised when the items are there; the batch then stays for the next
        call.
        """
        cdef dlrs_epoch *epoch_ptr = self.epoch.epoch_ptr
        cdef void *outcome = NULL
        cdef uint64_t batch = 0
        cdef dlrs_status status = DLRS_NOT_READY
        cdef object interrupt = None
        self.offer(self.taken + 1)
        while status == DLRS_NOT_READY:
            with nogil:
                status = dlrs_epoch_wait(epoch_ptr, SIGNAL_CHECK_NS)
            dlrs_epoch_attached(epoch_ptr)
            try:
                PyErr_CheckSignals()
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt
        PyContext_Enter(self.epoch.context)
        dlrs_enter_place(&self.place, <PyObject *>self.epoch)
        try:
            status = dlrs_epoch_take(epoch_ptr, &outcome, &batch)
            samples = self.taken_outcome(status, outcome, batch)
            if type(samples) is _Failure:
                return samples
            return self.epoch.collated(&self.place, batch, samples)
        finally:
            dlrs_leave_place(&self.place)
            PyContext_Exit(self.epoch.context)

    cdef object taken_outcome(self, dlrs_status status, void *outcome, uint64_t batch):
        if status == DLRS_OK:
            if outcome != <void *>NOTHING:
                self.count_taken(batch)
            result = <object>outcome
            Py_DECREF(result)
            return result
        if status == DLRS_LOST:
            self.count_taken(batch)
            return OUT_OF_MEMORY
        if status == DLRS_NO_WORKER:
            self.end_early()
            raise MemoryError("no memory for a worker to start: the epoch is over, a new one tries again")
        self.check_usable()
        raise exiting("the workers have ended")


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


# These two are nobody else's: what is in their fields is trusted.
del globals()["_Failure"], globals()["_Epoch"]
