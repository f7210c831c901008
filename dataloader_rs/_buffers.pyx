# cython: language_level=3, freethreading_compatible=True
"""Arrays in recycled memory, and copying into them. Which memory is kept how long is in ``_store.c``; what may be
stacked with what is in ``collate.py``."""
import sys

cimport cython
from cpython.buffer cimport (PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_IsContiguous,
                             PyBuffer_Release, PyObject_GetBuffer)
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t


cdef extern from "_copy.h":
    void dlrs_copy_rows(char *to, const char **rows, size_t num_rows, size_t row_size) nogil

cdef extern from "_store.h":
    enum:
        DLRS_BUFFER_ALIGNMENT

    ctypedef struct dlrs_buffers_usage:
        size_t in_use
        size_t kept
        size_t limit
        uint64_t taken
        uint64_t reused

    void *dlrs_buffer_take(size_t size, size_t *capacity)
    void dlrs_buffer_give(void *memory, size_t capacity)
    size_t dlrs_buffers_release() nogil
    void dlrs_buffers_set_limit(size_t limit) nogil
    dlrs_buffers_usage dlrs_buffers_get_usage()
    void dlrs_buffers_skip_time(uint64_t duration_ns)

cdef extern from "_freethreading.h":
    void dlrs_disown(PyObject *batch, PyObject *array_type, PyObject *base)

# Unsigned bytes, in the words of the buffer protocol.
cdef char *FORMAT = b"B"

ALIGNMENT = DLRS_BUFFER_ALIGNMENT

cdef object BASE = sys.intern("base")   # for dlrs_disown

# Bytes from which on copying lets other threads have the interpreter. Copying so much takes as long as some ten
# hand-overs of an interpreter that nobody else wants.
cdef enum:
    LEAST_DETACHED = 262144


@cython.final
cdef class Buffer:
    """Memory from the store, which goes back there when the last reference to this object goes.

    An array that is made on it holds such a reference, a view of the array holds the array, and so on: nobody who can
    reach the memory is left when it is used again. *Thread safety.* It may die on any thread.
    """

    cdef void *memory
    cdef size_t capacity
    cdef Py_ssize_t size

    def __cinit__(self, Py_ssize_t size):
        self.memory = dlrs_buffer_take(size, &self.capacity)
        if self.memory == NULL:
            raise MemoryError(f"no memory for an array of {size} bytes")
        self.size = size

    def __dealloc__(self):
        if self.memory != NULL:
            dlrs_buffer_give(self.memory, self.capacity)

    def __getbuffer__(self, Py_buffer *view, int flags):
        view.buf = self.memory
        view.obj = self
        view.len = self.size
        view.itemsize = 1
        view.readonly = 0
        view.ndim = 1
        view.format = FORMAT if flags & PyBUF_FORMAT else NULL
        view.shape = &view.len if flags & PyBUF_ND else NULL
        view.strides = &view.itemsize if (flags & PyBUF_STRIDES) == PyBUF_STRIDES else NULL
        view.suboffsets = NULL
        view.internal = NULL

    def __reduce__(self):
        raise TypeError("a Buffer is memory of this process and is not pickled")


def empty_array(array_type, tuple shape, dtype, Py_ssize_t size):
    """An array of `size` bytes in recycled memory, with anything in it.

    Its only base is the buffer. It counts as nobody's own on free-threaded builds: whoever drops it last gives the
    buffer back at once, also if that is another thread than this one.
    """
    array = array_type(shape, dtype, Buffer(size))
    dlrs_disown(<PyObject *>array, <PyObject *>array_type, <PyObject *>BASE)
    return array


def copy_rows(target, list rows, Py_ssize_t row_size):
    """Copy rows side by side into `target`; the positions of those that are not C-contiguous, which are left out.

    Parameters
    ----------
    target : object
        Writable and C-contiguous memory of ``len(rows) * row_size`` bytes.
    rows : list of numpy.ndarray
        Each of `row_size` bytes, with the layout that the target has. Nobody else knows the list.
    """
    cdef Py_ssize_t num_rows = len(rows)
    cdef Py_ssize_t i
    cdef list left_out = []
    cdef Py_buffer view
    cdef Py_buffer target_view
    cdef char *to
    cdef const char **sources = <const char **>PyMem_Malloc(num_rows * sizeof(char *))
    if sources == NULL:
        raise MemoryError(f"no memory for the places of {num_rows} samples")
    try:
        for i in range(num_rows):
            PyObject_GetBuffer(rows[i], &view, PyBUF_STRIDES)
            if view.len == row_size and PyBuffer_IsContiguous(&view, b"C"):
                sources[i] = <const char *>view.buf
            else:
                sources[i] = NULL
                left_out.append(i)
            # An array does not move its memory while somebody else, here the list, holds a reference to it.
            PyBuffer_Release(&view)
        PyObject_GetBuffer(target, &target_view, PyBUF_WRITABLE)
        try:
            if target_view.len != num_rows * row_size:
                raise ValueError(f"target must have {num_rows} * {row_size} bytes, got {target_view.len}")
            to = <char *>target_view.buf
            if target_view.len >= LEAST_DETACHED:
                with nogil:
                    dlrs_copy_rows(to, sources, num_rows, row_size)
            else:
                dlrs_copy_rows(to, sources, num_rows, row_size)
        finally:
            PyBuffer_Release(&target_view)
    finally:
        PyMem_Free(sources)
    return left_out


def usage():
    """Bytes in use, bytes kept and their limit; buffers taken, and how many of those were used before."""
    cdef dlrs_buffers_usage now = dlrs_buffers_get_usage()
    return {"in_use": now.in_use, "kept": now.kept, "limit": now.limit, "taken": now.taken, "reused": now.reused}


def release():
    """Give all that is kept back to the system; how many bytes that was."""
    cdef size_t size
    with nogil:
        size = dlrs_buffers_release()
    return size


def set_limit(size_t limit):
    """Set how many bytes may be kept."""
    with nogil:
        dlrs_buffers_set_limit(limit)


def skip_time(double seconds):
    """For tests: let the store believe that so much more time has passed."""
    dlrs_buffers_skip_time(<uint64_t>(seconds * 1e9))
