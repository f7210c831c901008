# cython: language_level=3, freethreading_compatible=True
"""What ``sharing.py`` may do to a single object. Which version allows what is in ``_freethreading.h``."""


cdef extern from "_freethreading.h":
    bint DLRS_FREE_THREADED
    void dlrs_defer_refcount(object obj)
    bint dlrs_is_immortal(object obj)
    bint dlrs_make_immortal(object obj)

cdef extern from "Python.h":
    ctypedef struct PyTypeObject:
        pass

    unsigned long Py_TPFLAGS_HEAPTYPE
    PyTypeObject *Py_TYPE(object obj)
    bint PyType_HasFeature(PyTypeObject *type, unsigned long feature)

FREE_THREADED = bool(DLRS_FREE_THREADED)


def defer(obj):
    """Defer the reference counting of `obj` where the interpreter can."""
    dlrs_defer_refcount(obj)


def is_immortal(obj):
    """Whether `obj` is never counted and never freed; always False on builds with the GIL."""
    return dlrs_is_immortal(obj)


def make_immortal(obj):
    """Make an object of an exact immutable type immortal where that is sound; whether it is now."""
    return dlrs_make_immortal(obj)


def is_instance(obj):
    """Whether the class of `obj` was made at run time, as those of Python code are. Asks no code of the class."""
    return PyType_HasFeature(Py_TYPE(obj), Py_TPFLAGS_HEAPTYPE)
