# _order.h as Cython sees it, and the class that others may use without a Python call.

cimport cython
from libc.stdint cimport uint64_t


cdef extern from "_order.h" nogil:
    int DLRS_ORDER_VERSION

    ctypedef struct dlrs_order:
        uint64_t length

    bint dlrs_order_init(dlrs_order *order, uint64_t length, uint64_t seed, uint64_t epoch)
    uint64_t dlrs_order_at(const dlrs_order *order, uint64_t position)
    void dlrs_order_fill(const dlrs_order *order, uint64_t first, size_t count, uint64_t *indices)
    uint64_t dlrs_order_find(const dlrs_order *order, uint64_t index)
    void dlrs_order_free(dlrs_order *order)


@cython.final
cdef class ShuffledOrder:
    cdef dlrs_order order

    cdef list piece(self, uint64_t first, uint64_t count)
