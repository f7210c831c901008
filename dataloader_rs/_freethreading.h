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

/* Move all references to `object` to the shared count and give up the ownership. The caller is attached and holds a
 * reference. Returns whether the counts are merged now, and not about to be merged by somebody else. */
static inline int dlrs_merge_refcount(PyObject *object)
{
    Py_ssize_t shared = _Py_atomic_load_ssize_relaxed(&object->ob_ref_shared);
    if (!_Py_IsOwnedByCurrentThread(object))
        return (shared & _Py_REF_SHARED_FLAG_MASK) == _Py_REF_MERGED;
    Py_ssize_t local = (Py_ssize_t)_Py_atomic_load_uint32_relaxed(&object->ob_ref_local);
    do {
        if ((shared & _Py_REF_SHARED_FLAG_MASK) == _Py_REF_QUEUED)
            return 0;
    } while (
        !_Py_atomic_compare_exchange_ssize(&object->ob_ref_shared, &shared, shared + (local << _Py_REF_SHARED_SHIFT)));
    _Py_atomic_store_uint32_relaxed(&object->ob_ref_local, 1);
    Py_DECREF(object);
    return 1;
}

/* Give up the array, or whatever else, that an array looks into. As a rule all samples of a batch look into the same
 * one, so it is given up as a whole, and found to be so by those that follow. `name` is "base": interned, since a new
 * string is looked up anew, and drives others out of the cache of the type. */
static void dlrs_disown_base(PyObject *array, PyObject *array_type, PyObject *name, int depth)
{
    PyObject *base = PyObject_GetAttr(array, name);
    if (base == NULL) {
        PyErr_Clear();
        return;
    }
    if (dlrs_is_own(base)) {
        /* As frombuffer() makes them, whose memory is that of yet another object. */
        if (depth < DLRS_DISOWN_DEPTH && (PyObject *)Py_TYPE(base) == array_type)
            dlrs_disown_base(base, array_type, name, depth + 1);
        dlrs_merge_refcount(base);
    }
    Py_DECREF(base);
}

static void dlrs_disown_tree(PyObject *object, PyObject *array_type, PyObject *name, int depth, int *budget)
{
    if (--*budget < 0 || !dlrs_is_own(object))
        return;
    /* What lies inside comes first: after that the object is not ours to look into. A container that somebody else
     * holds as well may be changed meanwhile, and containers of other types may answer with anything. */
    if (depth < DLRS_DISOWN_DEPTH && dlrs_is_unique(object)) {
        if (PyList_CheckExact(object)) {
            for (Py_ssize_t i = 0; i < PyList_GET_SIZE(object); i++)
                dlrs_disown_tree(PyList_GET_ITEM(object, i), array_type, name, depth + 1, budget);
        } else if (PyTuple_CheckExact(object)) {
            for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); i++)
                dlrs_disown_tree(PyTuple_GET_ITEM(object, i), array_type, name, depth + 1, budget);
        } else if (PyDict_CheckExact(object)) {
            PyObject *key, *value;
            Py_ssize_t position = 0;
            while (PyDict_Next(object, &position, &key, &value)) {
                dlrs_disown_tree(key, array_type, name, depth + 1, budget);
                dlrs_disown_tree(value, array_type, name, depth + 1, budget);
            }
        } else if ((PyObject *)Py_TYPE(object) == array_type) {
            dlrs_disown_base(object, array_type, name, depth);
        }
    }
    dlrs_disown_object(object);
}

/* NOTE [ immortal leaves ] For `share(obj, immortal=True)`: an object whose local count is _Py_IMMORTAL_REFCNT_LOCAL is
 * counted by nobody, so any number of threads may touch it at no cost, and it is never freed. Other threads may hold,
 * take and drop references while this thread makes it immortal. That is sound for these reasons:
 *
 * 1. Nobody else writes the local count. It is written by the owner, by whoever merges the two counts (the owner, the
 *    collector or another thread, of which the last two wait until the owner is detached; this code does not detach
 *    between its checks and its writes), and by nobody once they are merged. So only objects of the calling thread and
 *    merged ones are touched. CPython's own interning keeps to the same rule (gh-148886). An object of another thread
 *    that has not given it up is refused, also if that thread has ended: its id may be in use again.
 * 2. A count that would come back to life is refused. A thread that drops a reference which was counted locally puts
 *    the object into the queue of its owner, who merges the counts when it next looks. If the object were immortal by
 *    then, the merge would overwrite the mark (gh-152276). Therefore the counts are merged first: all local references
 *    move into the shared count in one atomic step, which is not taken if the flag of the queue is set. From then on
 *    the shared count is that of all references, the caller's among them, so it cannot fall to 0, which is what would
 *    make another thread put the object into the queue. The last step is the interpreter's own: Py_DECREF of the last
 *    local reference clears the owner and sets the flag for merged counts.
 * 3. Whatever other threads still count lands in the shared count, where it is true or too high, never too low. A
 *    thread that sees the mark when it takes a reference passes that on with the reference, so whoever drops that sees
 *    the mark as well: a reference is counted at both ends, or only when it was taken, or at neither. With the one
 *    reference that is added here and never given back, a thread that read the local count just before the mark was
 *    set, and now drops its reference, cannot find the last one gone.
 * 4. The collector leaves immortal objects out and no longer tracks them. For it, what they hold is held from outside.
 *
 * The interpreter wishes every immortal str to be interned, so interning comes first. If an equal one is interned
 * already, this one becomes immortal without: interning allows for that ("if it's already immortal, intern it as
 * such", and gh-121358), and the reason for the wish is that such copies are redundant. */

#endif

#ifdef Py_GIL_DISABLED
enum { DLRS_FREE_THREADED = 1 };
#else
enum { DLRS_FREE_THREADED = 0 };
#endif

/* Is `object` never freed and never counted? PyUnstable_IsImmortal is public since 3.14. Never on builds with the GIL:
 * nobody asks there. */
static inline int dlrs_is_immortal(PyObject *object)
{
#if !defined(Py_GIL_DISABLED)
    (void)object;
    return 0;
#elif PY_VERSION_HEX >= 0x030E0000
    return PyUnstable_IsImmortal(object);
#else
    return _Py_IsImmortal(object);
#endif
}

/* Make a str, int, float, complex or bytes immortal, or a tuple or frozenset of immortal objects: of exactly these
 * types, which nobody changes. Returns whether it is immortal now; a refusal changes no value and no meaning. The
 * caller is attached and holds a reference; other threads may read the object meanwhile. NOTE [ immortal leaves ]
 * says why that is sound.
 *
 *   3.13 to 3.15   strings are interned, which makes them immortal; otherwise the fields are written
 *   3.16 and newer strings are interned; otherwise what the public call takes. It is there since 3.15, where it takes
 *                  objects with a single reference only, and never a str.
 *   Py_REF_DEBUG   as 3.16 and newer: a total of all counts must not be bypassed
 *   with the GIL   nothing */
static inline int dlrs_make_immortal(PyObject *object)
{
#ifdef Py_GIL_DISABLED
    if (dlrs_is_immortal(object))
        return 1;
#ifdef DLRS_CAN_DISOWN
    if (!dlrs_merge_refcount(object))
        return 0;
#endif
    if (PyUnicode_CheckExact(object)) {
        PyObject *interned = object;
        Py_INCREF(object);
        PyUnicode_InternInPlace(&interned);
        Py_DECREF(interned);
    }
#if PY_VERSION_HEX >= 0x030F0000
    else {
        PyUnstable_SetImmortal(object);
    }
#endif
#ifdef DLRS_CAN_DISOWN
    if (!dlrs_is_immortal(object)) {
        Py_INCREF(object); /* never given back */
        _Py_atomic_store_uint32_relaxed(&object->ob_ref_local, _Py_IMMORTAL_REFCNT_LOCAL);
    }
#endif
#endif
    return dlrs_is_immortal(object);
}

/* Give up the ownership of a batch that this thread made and is about to hand to another: of the batch itself and of
 * what lies in its lists, tuples and dicts. `array_type` is numpy.ndarray, or any other object: an array that is a
 * view also gives up what it looks into; `base` is that word, interned. The caller is attached and holds a reference.
 * Other threads may know what the batch holds, or the batch itself: that is not looked into. Only makes things be freed
 * sooner: whatever is left out is freed when this thread next runs Python. */
static inline void dlrs_disown(PyObject *batch, PyObject *array_type, PyObject *base)
{
#ifdef DLRS_CAN_DISOWN
    int budget = DLRS_DISOWN_OBJECTS;
    dlrs_disown_tree(batch, array_type, base, 0, &budget);
#else
    (void)batch;
    (void)array_type;
    (void)base;
#endif
}

#endif
