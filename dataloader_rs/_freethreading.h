/* Reference counts on free-threaded CPython: what may be called where, on which version. On builds with the GIL
 * everything here is empty.
 *
 * An object's count has two parts there: a local one, which only the thread that made the object changes, and a
 * shared one, changed atomically by all others. Two things follow for a loader:
 *   - an object that every worker touches (the dataset) makes the workers contend for its shared count;
 *   - an object that a worker made and the consumer drops is freed only when that worker next runs Python, so a
 *     parked worker keeps every batch it made. */
#ifndef DLRS_FREETHREADING_H
#define DLRS_FREETHREADING_H

#include <Python.h>

/* Let the interpreter leave out the counting of references that its own stack holds to `object`. The object then
 * dies in a garbage collection only. Public since 3.14, where it does nothing to objects that are not tracked by
 * the collector; nothing to do on other versions. May be called from any attached thread, and twice. */
static inline void dlrs_defer_refcount(PyObject *object)
{
#if defined(Py_GIL_DISABLED) && PY_VERSION_HEX >= 0x030E0000
    if (PyObject_IS_GC(object))
        PyUnstable_Object_EnableDeferredRefcount(object);
#else
    (void)object;
#endif
}

/* The layout of the counts is that of 3.13 to 3.15; Py_REF_DEBUG keeps a total that must not be bypassed. */
#if defined(Py_GIL_DISABLED) && !defined(Py_REF_DEBUG) && PY_VERSION_HEX >= 0x030D0000 && PY_VERSION_HEX < 0x03100000
#define DLRS_CAN_DISOWN 1

/* Most objects that are disowned for one batch: 5 ns each, against tens of ns that it took to make them. */
enum { DLRS_DISOWN_OBJECTS = 4096, DLRS_DISOWN_DEPTH = 4 };

/* Is `object` counted locally by the calling thread, and mortal? */
static inline int dlrs_is_own(PyObject *object)
{
    return _Py_IsOwnedByCurrentThread(object)
           && _Py_atomic_load_uint32_relaxed(&object->ob_ref_local) != _Py_IMMORTAL_REFCNT_LOCAL;
}

/* Is the one reference its holder has the only one? Then no other thread can look into the object or change it. */
static inline int dlrs_is_unique(PyObject *object)
{
    return _Py_atomic_load_uint32_relaxed(&object->ob_ref_local) == 1
           && _Py_atomic_load_ssize_relaxed(&object->ob_ref_shared) == 0;
}

/* Move one reference from the local to the shared count of an object of this thread. The sum does not change. If it
 * was the only local one, the interpreter itself gives up the ownership, and whichever thread drops the last
 * reference frees the object at once. */
static inline void dlrs_disown_object(PyObject *object)
{
    _Py_atomic_add_ssize(&object->ob_ref_shared, (Py_ssize_t)1 << _Py_REF_SHARED_SHIFT);
    Py_DECREF(object);
}

static void dlrs_disown_tree(PyObject *object, PyObject *array_type, int depth, int *budget)
{
    if (--*budget < 0 || !dlrs_is_own(object))
        return;
    /* What lies inside comes first: after that the object is not ours to look into. A container that somebody else
     * holds as well may be changed meanwhile, and containers of other types may answer with anything. */
    if (depth < DLRS_DISOWN_DEPTH && dlrs_is_unique(object)) {
        if (PyList_CheckExact(object)) {
            for (Py_ssize_t i = 0; i < PyList_GET_SIZE(object); i++)
                dlrs_disown_tree(PyList_GET_ITEM(object, i), array_type, depth + 1, budget);
        } else if (PyTuple_CheckExact(object)) {
            for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); i++)
                dlrs_disown_tree(PyTuple_GET_ITEM(object, i), array_type, depth + 1, budget);
        } else if (PyDict_CheckExact(object)) {
            PyObject *key, *value;
            Py_ssize_t position = 0;
            while (PyDict_Next(object, &position, &key, &value)) {
                dlrs_disown_tree(key, array_type, depth + 1, budget);
                dlrs_disown_tree(value, array_type, depth + 1, budget);
            }
        } else if ((PyObject *)Py_TYPE(object) == array_type) {
            PyObject *base = PyObject_GetAttrString(object, "base");
            if (base == NULL) {
                PyErr_Clear();
            } else {
                dlrs_disown_tree(base, array_type, depth + 1, budget);
                Py_DECREF(base);
            }
        }
    }
    dlrs_disown_object(object);
}
#endif

/* Give up the ownership of a batch that this thread made and is about to hand to another: of the batch itself and of
 * what lies in its lists, tuples and dicts. `array_type` is numpy.ndarray, or any other object: an array that is a
 * view also gives up the arrays it looks into. The caller is attached and holds a reference. Other threads may
 * know what the batch holds, or the batch itself: that is not looked into. Only makes things be freed sooner: whatever is left out is freed when this thread next runs
 * Python. */
static inline void dlrs_disown(PyObject *batch, PyObject *array_type)
{
#ifdef DLRS_CAN_DISOWN
    int budget = DLRS_DISOWN_OBJECTS;
    dlrs_disown_tree(batch, array_type, 0, &budget);
#else
    (void)batch;
    (void)array_type;
#endif
}

#endif
