# What `iter(loader)` returns.

from types import GenericAlias

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t, uint64_t

from dataloader_rs.errors import explain, explain_stream, interrupted, not_the_end
from dataloader_rs.stuck import start_timeout_error, timeout_error


# Longer lists of indices are cut in the note of an error.
cdef uint64_t NOTED_INDICES = 100


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
            # Each time: what calls us, as list() does, may be no Python code, and then nobody else looks.
            PyErr_CheckSignals()
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
            if status == DLRS_END:
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
