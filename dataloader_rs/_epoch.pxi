# What becomes of the indices of an epoch, on a worker or on the calling thread.

import sys
from itertools import islice

cimport cython
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF
from libc.stdint cimport int64_t, uint64_t

from dataloader_rs._shuffle cimport ShuffledOrder


cdef object BASE = sys.intern("base")    # for dlrs_disown


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
            dlrs_disown(<PyObject *>(<_Failure>outcome).error, <PyObject *>self.array_type, <PyObject *>BASE)
        dlrs_disown(outcome, <PyObject *>self.array_type, <PyObject *>BASE)


cdef dlrs_epoch *epoch_of(PyObject *self) noexcept:
    return (<_Epoch>self).epoch_ptr


dlrs_show_slots_to_collector(_Epoch, epoch_of)
