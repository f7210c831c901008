/* What the bridge needs in C because Cython has no word for it: attaching a worker to the interpreter by hand, showing
 * the garbage collector what lies in the reorder buffer, raising an exception object as it is, atomic fields, which
 * epoch the calling thread works for, and what it is asked for there. */
#ifndef DLRS_BRIDGE_H
#define DLRS_BRIDGE_H

#include <Python.h>

#include "_fork.h"
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
    /* Called attached. `start` says whether the worker can work; `end` comes after it in any case. */
    int (*start)(dlrs_worker *worker, PyObject *crew);
    void (*work)(dlrs_worker *worker, const dlrs_run *run);
    void (*end)(dlrs_worker *worker, PyObject *crew);

    /* NOTE [ who holds the crew ] The workers of a pool share a Python object, their crew, that leads to the dataset
     * and to functions of the user, and from there perhaps back to the loader. If a thread held a reference, the
     * collector would take such a loader for one in use. So the workers borrow the reference of the pool's owner, which
     * the collector sees. An owner that goes leaves them a reference of their own, and the last of them drops it. */
    PyObject *crew; /* may be NULL */
    uint64_t holds; /* the owner, and each worker until it has ended; whoever is last frees this */
} dlrs_python;

typedef struct dlrs_python_thread {
    dlrs_python *python;
    PyThreadState *state;
} dlrs_python_thread;

/* The hooks of one pool. Its owner keeps `crew` alive until it leaves. */
static inline dlrs_python *dlrs_python_new(const dlrs_python *hooks, PyObject *crew, unsigned num_threads)
{
    dlrs_python *python = PyMem_RawMalloc(sizeof *python);
    if (python == NULL)
        return NULL;
    *python = *hooks;
    python->crew = crew;
    python->holds = 1 + (uint64_t)num_threads;
    return python;
}

/* For a pool that was not made after all, or by whoever was the last. */
static inline void dlrs_python_free(dlrs_python *python)
{
    PyMem_RawFree(python);
}

/* Give up a hold. True if it was the last one, and the rest is the caller's to drop. */
static inline int dlrs_python_let_go(dlrs_python *python)
{
    return __atomic_fetch_sub(&python->holds, 1, __ATOMIC_ACQ_REL) == 1;
}

static inline void dlrs_python_drop(dlrs_python *python)
{
    Py_XDECREF(python->crew);
    dlrs_python_free(python);
}

/* Give up a hold. Called attached; an owner leaves a reference to the crew behind. */
static inline void dlrs_python_leave(dlrs_python *python)
{
    if (dlrs_python_let_go(python))
        dlrs_python_drop(python);
}

/* Number of the pool that the calling thread is a worker of, or 0. */
static _Thread_local uint64_t dlrs_current_pool;

static inline uint64_t dlrs_get_current_pool(void)
{
    return dlrs_current_pool;
}

/* See NOTE [ steps and forks ]. Called without a thread state. */
static PyThreadState *dlrs_new_state(PyInterpreterState *interpreter)
{
    dlrs_begin_new_state();
    PyThreadState *state = PyThreadState_New(interpreter);
    dlrs_end_new_state();
    return state;
}

/* Leave the attached thread without a thread state. */
static void dlrs_end_state(PyThreadState *state)
{
    /* Drops what the thread has in threading.local, here, where it was made. */
    PyThreadState_Clear(state);
    PyThreadState_DeleteCurrent();
}

/* Called attached, and leaves the thread without a thread state. */
static void dlrs_end_python(dlrs_python_thread *thread, dlrs_worker *worker)
{
    thread->python->end(worker, thread->python->crew);
    dlrs_python_leave(thread->python);
    dlrs_end_state(thread->state);
    PyMem_RawFree(thread);
}

static void *dlrs_enter_python(void *context, dlrs_worker *worker)
{
    dlrs_current_pool = dlrs_worker_pool_id(worker);
    dlrs_python_thread *thread = PyMem_RawMalloc(sizeof *thread);
    if (thread == NULL)
        return NULL; /* it keeps its hold, and the crew stays, since nobody detached can drop that */
    thread->python = context;
    thread->state = dlrs_new_state(thread->python->interpreter);
    if (thread->state == NULL) {
        PyMem_RawFree(thread);
        return NULL;
    }
    PyEval_RestoreThread(thread->state);
    if (!thread->python->start(worker, thread->python->crew)) {
        dlrs_end_python(thread, worker);
        return NULL;
    }
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
    dlrs_end_python(thread, worker);
}

/* A worker that never had anything to do ends. */
static void dlrs_skip_python(void *context, dlrs_worker *worker)
{
    dlrs_python *python = context;
    dlrs_current_pool = dlrs_worker_pool_id(worker);
    if (!dlrs_python_let_go(python))
        return;
    PyThreadState *state = python->crew == NULL ? NULL : dlrs_new_state(python->interpreter);
    if (state == NULL) {
        if (python->crew == NULL)
            dlrs_python_free(python);
        return; /* or there is no memory: the crew stays, since nobody detached can drop it */
    }
    PyEval_RestoreThread(state);
    dlrs_python_drop(python);
    dlrs_end_state(state);
}

static inline dlrs_hooks dlrs_python_hooks(dlrs_python *python)
{
    return (dlrs_hooks){.enter = dlrs_enter_python,
                        .attach = dlrs_attach_python,
                        .detach = dlrs_detach_python,
                        .work = dlrs_work_in_python,
                        .leave = dlrs_leave_python,
                        .skip = dlrs_skip_python,
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

/* ---- what the calling thread is asked for ----
 *
 * NOTE [ places ] Random numbers of a sample are keyed by its position in the epoch, so the thread that makes it must
 * know that position. Items are asked for by Python code that counts nothing (fetch.py). So whoever works for an epoch
 * has a place that says which items it is asked for, stored once for a batch; the item that is under way follows from
 * what is left in the iterator over their indices. A loader inside an item has a place of its own, which leads back to
 * the one around it. Places do not lie on the stack, and may be left in any order: the items of several loaders may be
 * under way in greenlets, which move pieces of the stack elsewhere and take turns. */
enum {
    DLRS_ASKED_NOTHING = 0,
    DLRS_ASKED_ITEMS,  /* one after the other */
    DLRS_ASKED_MANY,   /* in one call */
    DLRS_ASKED_COLLATE,
};

typedef struct dlrs_place dlrs_place;
struct dlrs_place {
    dlrs_place **current; /* the thread's; to look that up costs more than all the rest */
    dlrs_place *around;
    PyObject *epoch;      /* borrowed from whoever works for it */
    PyObject *iterator;   /* over the indices of the items that are asked for; borrowed meanwhile; NULL if it is one */
    uint64_t first;       /* position in the epoch of the first of them; for `collate`, the number of the batch */
    uint64_t count;
    PyObject *generators; /* dict of those that were made for what is asked; owned; NULL if there are none */
    int asked;
};

static _Thread_local dlrs_place *dlrs_current_place;
static _Thread_local dlrs_place dlrs_worker_place;

/* The innermost place of the calling thread; NULL outside of all work. */
static inline dlrs_place *dlrs_get_place(void)
{
    return dlrs_current_place;
}

/* The one that a worker works in. */
static inline dlrs_place *dlrs_get_worker_place(void)
{
    return &dlrs_worker_place;
}

static inline void dlrs_enter_place(dlrs_place *place, PyObject *epoch)
{
    place->epoch = epoch;
    place->generators = NULL;
    place->asked = DLRS_ASKED_NOTHING;
    place->current = &dlrs_current_place;
    place->around = *place->current;
    *place->current = place;
}

static inline void dlrs_ask(dlrs_place *place, int asked, PyObject *iterator, uint64_t first, uint64_t count)
{
    place->iterator = iterator;
    place->first = first;
    place->count = count;
    place->asked = asked;
    if (place->generators != NULL)
        Py_CLEAR(place->generators);
}

static inline void dlrs_ask_nothing(dlrs_place *place)
{
    place->asked = DLRS_ASKED_NOTHING;
    if (place->generators != NULL)
        Py_CLEAR(place->generators);
}

static inline void dlrs_leave_place(dlrs_place *place)
{
    dlrs_ask_nothing(place);
    dlrs_place **link = place->current;
    while (*link != place)
        link = &(*link)->around;
    *link = place->around;
}

/* ---- the crew the calling thread belongs to ----
 *
 * Borrowed, see NOTE [ who holds the crew ]: set when a worker starts and cleared when it ends. */
static _Thread_local PyObject *dlrs_current_crew;
static _Thread_local unsigned dlrs_current_worker; /* its number in the crew */

static inline PyObject *dlrs_get_current_crew(void)
{
    return dlrs_current_crew;
}

static inline unsigned dlrs_get_current_worker(void)
{
    return dlrs_current_worker;
}

static inline void dlrs_set_current_crew(PyObject *crew, unsigned worker)
{
    dlrs_current_crew = crew;
    dlrs_current_worker = worker;
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

/* Take the exception that a call has left, a new reference, so that there is none any more. In C, since the `except` of
 * Cython wants memory for a traceback, and crashes without. NULL if there was no memory for one: where CPython 3.11 has
 * none for the first frame of a thread, a call fails and leaves no exception. */
static inline PyObject *dlrs_take_raised(void)
{
#if PY_VERSION_HEX >= 0x030C0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    if (type == NULL)
        return NULL;
    PyErr_NormalizeException(&type, &error, &traceback);
    if (error != NULL && traceback != NULL)
        PyException_SetTraceback(error, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return error;
#endif
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
