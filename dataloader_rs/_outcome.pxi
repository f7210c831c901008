# What stands in a slot: a batch, a failure, or nothing; and the references to it.

cimport cython
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t


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


cdef inline PyObject *new_reference(obj) noexcept:
    Py_INCREF(obj)
    return <PyObject *>obj


cdef _Failure failure_of_taken(PyObject *error, int64_t position):
    # What stands in the slot for an exception that was taken by `dlrs_take_raised`.
    return OUT_OF_MEMORY if error == NULL else _Failure.of(owned(error), position)


cdef inline object outcome_of_call(PyObject *result, int64_t position):
    # What a C call has returned, or a `_Failure` for the exception that it has left.
    return failure_of_taken(dlrs_take_raised(), position) if result == NULL else owned(result)


cdef void sign(outcome, dlrs_worker *worker) noexcept:
    # Put the worker's number on a failure that has none yet.
    if type(outcome) is _Failure and outcome is not OUT_OF_MEMORY and (<_Failure>outcome).worker < 0:
        (<_Failure>outcome).worker = dlrs_worker_index(worker)
