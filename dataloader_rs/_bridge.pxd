# What _core uses of C beside the pool, as Cython sees it. The contracts are in the headers; nothing is added here.

from cpython.object cimport PyObject
from libc.stdint cimport uint64_t

from dataloader_rs._pool cimport dlrs_epoch, dlrs_hooks, dlrs_run, dlrs_worker


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
    void dlrs_show_slots_to_collector(object type, dlrs_epoch *(*epoch_of)(PyObject *self) noexcept)
    int dlrs_raise(object error) except -1
    uint64_t dlrs_load(const uint64_t *field)
    void dlrs_store(uint64_t *field, uint64_t value)
    uint64_t dlrs_fetch_add(uint64_t *field, uint64_t value)
    bint dlrs_try_set(uint64_t *flag)
    PyObject *dlrs_fetch(PyObject *fetch, PyObject *dataset, PyObject *run)
    PyObject *dlrs_take_raised()

cdef extern from "_fork.h":
    bint dlrs_try_begin_step()
    void dlrs_end_step()
    void dlrs_await_no_fork() nogil
    void dlrs_begin_fork(bint waits) nogil
    void dlrs_end_fork()
    int dlrs_prepare_forks()

cdef extern from "_platform.h" nogil:
    uint64_t dlrs_now_ns()

cdef extern from "_freethreading.h":
    void dlrs_defer_refcount(object obj)
    void dlrs_disown(PyObject *batch, PyObject *array_type, PyObject *base)

cdef extern from "Python.h":
    PyInterpreterState *PyInterpreterState_Get()
    PyInterpreterState *PyInterpreterState_Main()
    size_t PyThread_get_stacksize()
    void PyException_SetCause(object error, PyObject *cause)
    object PyContext_CopyCurrent()
    object PyContext_Copy(object context)
    int PyContext_Enter(object context) except -1
    int PyContext_Exit(object context) except -1
    PyObject *PyObject_CallOneArg(PyObject *function, PyObject *argument)
    PyObject *PyObject_GetItem(PyObject *obj, PyObject *key)
    Py_ssize_t PyObject_LengthHint(object obj, Py_ssize_t default) except -1
