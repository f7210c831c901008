/* What the bridge needs in C because Cython has no word for it: attaching a worker to the interpreter by hand, showing
 * the garbage collector what lies in the reorder buffer, raising an exception object as it is, atomic fields, and which
 * epoch the calling thread works for. */
#ifndef DLRS_BRIDGE_H
#define DLRS_BRIDGE_H

#include <Python.h>
#include <pthread.h>

#include "_pool.h"

/* ---- thread states ----
 *
 * NOTE [ thread states ] A worker has one PyThreadState for its whole life, made on the worker itself, and reattaches
 * it for each stretch of work. The usual PyGILState_Ensure would make and destroy a state each time, which costs a
 * hundred times as much and empties threading.local. The state is attached exactly while Python code of the worker
 * runs; a parked worker is detached, so that it never holds up the GIL, a stop-the-world pause or the exit.
 *
 * Once the interpreter is being finalized, attaching ends the thread (CPython before 3.13.8) or never returns (later
 * ones). Either is fine at each place below, and between two items of a run (dlrs_worker_let_consumers_pass), because
 * no lock is held there and nobody waits for the worker any more. */
typedef struct dlrs_python {
    PyInterpreterState *interpreter;
    /* Called attached. */
    void (*start)(dlrs_worker *worker);
    void (*work)(dlrs_worker *worker, const dlrs_run *run);
    void (*end)(dlrs_worker *worker);
} dlrs_python;

typedef struct dlrs_python_thread {
    const dlrs_python *python;
    PyThreadState *state;
} dlrs_python_thread;

/* Number of the pool that the calling thread is a worker of, or 0. */
static _Thread_local uint64_t dlrs_current_pool;

static inline uint64_t dlrs_get_current_pool(void)
{
    return dlrs_current_pool;
}

/* NOTE [ new states and fork ] A thread state is made without the GIL, but under a lock of the interpreter's, and the
 * child of a fork needs that lock: before CPython 3.12 fork() does not see to it. So whoever forks through Python first
 * waits, with this lock, until no worker is making a state. The child's only thread is the one that holds it. */
static pthread_mutex_t dlrs_new_state_lock = PTHREAD_MUTEX_INITIALIZER;

static inline void dlrs_hold_new_states(void)
{
    pthread_mutex_lock(&dlrs_new_state_lock);
}

static inline void dlrs_release_new_states(void)
{
    pthread_mutex_unlock(&dlrs_new_state_lock);
}

static void *dlrs_enter_python(void *context, dlrs_worker *worker)
{
    dlrs_current_pool = dlrs_worker_pool_id(worker);
    dlrs_python_thread *thread = PyMem_RawMalloc(sizeof *thread);
    if (thread == NULL)
        return NULL;
    thread->python = context;
    dlrs_hold_new_states();
    thread->state = PyThreadState_New(thread->python->interpreter);
    dlrs_release_new_states();
    if (thread->state == NULL) {
        PyMem_RawFree(thread);
        return NULL;
    }
    PyEval_RestoreThread(thread->state);
    thread->python->start(worker);
    PyEval_SaveThread();
    return thread;
}

static void dlrs_attach_python(void *context)
{
    PyEval_RestoreThread(((dlrs_python_thread *)context)->state);
}

static void dlrs_detach_python(void *context)
{
    (void)context;
    PyEval_SaveThread();
}

static void dlrs_work_in_python(void *context, dlrs_worker *worker, const dlrs_run *run)
{
    ((dlrs_python_thread *)context)->python->work(worker, run);
}

static void dlrs_leave_python(void *context, dlrs_worker *worker)
{
    dlrs_python_thread *thread = context;
    PyEval_RestoreThread(thread->state);
    thread->python->end(worker);
    /* Drops what the thread has in threading.local, here, where it was made. */
    PyThreadState_Clear(thread->state);
    PyThreadState_DeleteCurrent();
    PyMem_RawFree(thread);
}

static inline dlrs_hooks dlrs_python_hooks(dlrs_python *python)
{
    return (dlrs_hooks){.enter = dlrs_enter_python,
                        .attach = dlrs_attach_python,
                        .detach = dlrs_detach_python,
                        .work = dlrs_work_in_python,
                        .leave = dlrs_leave_python,
                        .context = python};
}

/* ---- the epoch the calling thread works for ----
 *
 * Borrowed: set and cleared around the work, by whoever holds the epoch meanwhile. */
static _Thread_local PyObject *dlrs_current_epoch;

static inline PyObject *dlrs_get_current_epoch(void)
{
    return dlrs_current_epoch;
}

static inline void dlrs_set_current_epoch(PyObject *epoch)
{
    dlrs_current_epoch = epoch;
}

/* ---- garbage ----
 *
 * NOTE [ garbage ] What waits in the reorder buffer may lead back to the iterator: an exception does, through its
 * traceback and the frames of the loop that caught it before. Such a cycle is garbage only if the collector sees all of
 * it, so it is shown what the slots hold. That cannot change under it: things enter and leave slots on attached threads
 * only, all of which stand still while the collector looks (the GIL, or the stopped world). Workers that claim are
 * detached, and kept out by the lock of the pool, which nobody holds for long or while asking for the interpreter. */
static traverseproc dlrs_traverse_fields; /* what Cython made for the fields of the class */
static dlrs_epoch *(*dlrs_epoch_of)(PyObject *self);

typedef struct dlrs_visit {
    visitproc visit;
    void *argument;
} dlrs_visit;

static int dlrs_visit_object(void *object, void *context)
{
    const dlrs_visit *visitor = context;
    return visitor->visit(object, visitor->argument);
}

static int dlrs_traverse_epoch(PyObject *self, visitproc visit, void *argument)
{
    int status = dlrs_traverse_fields(self, visit, argument);
    dlrs_epoch *epoch = dlrs_epoch_of(self);
    if (status != 0 || epoch == NULL)
        return status;
    dlrs_visit visitor = {visit, argument};
    return dlrs_epoch_visit(epoch, dlrs_visit_object, &visitor);
}

/* Called once, before there is an object of the class. */
static inline void dlrs_show_slots_to_collector(PyObject *type, dlrs_epoch *(*epoch_of)(PyObject *self))
{
    dlrs_epoch_of = epoch_of;
    dlrs_traverse_fields = ((PyTypeObject *)type)->tp_traverse;
    ((PyTypeObject *)type)->tp_traverse = dlrs_traverse_epoch;
}

/* ---- exceptions ---- */

/* Raise `error` itself: its traceback is kept, and its context is not touched. Always -1. */
static inline int dlrs_raise(PyObject *error)
{
    Py_INCREF(error);
#if PY_VERSION_HEX >= 0x030C0000
    PyErr_SetRaisedException(error);
#else
    PyObject *type = (PyObject *)Py_TYPE(error);
    Py_INCREF(type);
    PyErr_Restore(type, error, PyException_GetTraceback(error));
#endif
    return -1;
}

/* ---- asking the dataset ----
 *
 * Here and where a single item is asked for, the dataset is borrowed from whoever keeps it alive for the call: on
 * free-threaded builds a reference of the caller's own would be counted, for each item, in a field that all threads
 * share. */

static inline PyObject *dlrs_fetch(PyObject *fetch, PyObject *dataset, PyObject *run)
{
    PyObject *arguments[] = {NULL, dataset, run}; /* the first is the callee's to use */
    return PyObject_Vectorcall(fetch, arguments + 1, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
}

/* Say, to code that looks for exceptions, that there is one. */
static inline int dlrs_pass_on(void)
{
    return -1;
}

/* ---- fields that several threads use ---- */

static inline uint64_t dlrs_load(const uint64_t *field)
{
    return __atomic_load_n(field, __ATOMIC_ACQUIRE);
}

static inline void dlrs_store(uint64_t *field, uint64_t value)
{
    __atomic_store_n(field, value, __ATOMIC_RELEASE);
}

static inline uint64_t dlrs_fetch_add(uint64_t *field, uint64_t value)
{
    return __atomic_fetch_add(field, value, __ATOMIC_ACQ_REL);
}

/* Set a flag; true if it was clear. Cleared by dlrs_store(flag, 0). For attached threads: with the GIL, no other looks
 * at the flag meanwhile, and it need not be an atomic step. */
static inline int dlrs_try_set(uint64_t *flag)
{
#ifdef Py_GIL_DISABLED
    return __atomic_exchange_n(flag, 1, __ATOMIC_ACQ_REL) == 0;
#else
    int was_clear = dlrs_load(flag) == 0;
    dlrs_store(flag, 1);
    return was_clear;
#endif
}

#endif
