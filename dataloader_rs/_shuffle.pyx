# cython: language_level=3, freethreading_compatible=True
"""The shuffled order of ``_order.c`` as a Python sequence."""
cimport cython
from cpython.list cimport PyList_New
from cpython.object cimport PyObject
from libc.stdint cimport INT64_MAX, uint64_t


cdef extern from "Python.h":
    PyObject *PyLong_FromLongLong(long long value) except NULL
    void PyList_SET_ITEM(object target, Py_ssize_t position, PyObject *item)


VERSION = DLRS_ORDER_VERSION

# Indices that are computed at a time.
cdef enum:
    PIECE = 256


@cython.final
cdef class ShuffledOrder:
    """The order in which one epoch visits a dataset, as an immutable sequence.

    Parameters
    ----------
    length : int
        Number of items.
    seed, epoch : int
        0 <= value < 2**64. Same numbers, same order, on every machine and version of Python.

    Notes
    -----
    Up to 65,536 items this is a table of 2 bytes an item; above, indices are computed one by one and nothing is
    held. Any number of threads may read it.
    """

    def __cinit__(self, uint64_t length, uint64_t seed, uint64_t epoch):
        if length > <uint64_t>INT64_MAX:
            raise OverflowError(f"length must be < 2**63, got {length}")
        if not dlrs_order_init(&self.order, length, seed, epoch):
            raise MemoryError(f"no memory for the order of {length} items")

    def __dealloc__(self):
        dlrs_order_free(&self.order)

    def __reduce__(self):
        raise TypeError("a ShuffledOrder is made anew from its length, seed and epoch, not pickled")

    def __len__(self):
        return self.order.length

    def __getitem__(self, key):
        cdef uint64_t i
        if isinstance(key, slice):
            start, stop, step = key.indices(self.order.length)
            if step == 1:
                return self.piece(start, max(stop - start, 0))
            return [dlrs_order_at(&self.order, i) for i in range(start, stop, step)]
        position = key if key >= 0 else key + len(self)
        if not 0 <= position < len(self):
            raise IndexError(f"position must be in 0 .. {len(self) - 1}, got {key}")
        return dlrs_order_at(&self.order, position)

    def find(self, uint64_t index):
        """The position of `index`."""
        if index >= self.order.length:
            raise ValueError(f"index must be in 0 .. {len(self) - 1}, got {index}")
        return dlrs_order_find(&self.order, index)

    cdef list piece(self, uint64_t first, uint64_t count):
        cdef uint64_t indices[PIECE]
        cdef uint64_t done = 0
        cdef size_t i
        cdef size_t num_indices
        cdef list result = PyList_New(count)
        while done < count:
            num_indices = min(count - done, <uint64_t>PIECE)
            dlrs_order_fill(&self.order, first + done, num_indices, indices)
            for i in range(num_indices):
                PyList_SET_ITEM(result, done + i, PyLong_FromLongLong(<long long>indices[i]))
            done += num_indices
        return result
