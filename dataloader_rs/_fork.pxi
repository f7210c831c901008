# What is held while the process forks, so that the child finds nothing of ours held by a thread that is not there.
#
# None of this is Python code: the handler of a signal, which may raise, could run before any line of that, and what is
# held then would be held for ever. Handlers run inside a wait for a lock, or when os.fork() has returned.
#
# No lock of others is held. Hooks of others run meanwhile, those that were registered before ours, and what they wait
# for may need it: that of `threading` is needed wherever a thread starts or ends. The child makes such locks anew.

import os
import threading

from dataloader_rs.threads import adopting as _adopting, ending_locks as _ending_locks


# Of each thread, by its identifier, for each fork that is under way, the innermost last: does it hold `adopting`?
cdef dict forks = {}


cdef object acquire(lock):
    # Acquire it in any case. What a handler has raised meanwhile, or None.
    cdef object error = None
    while True:
        try:
            lock.acquire()
            return error
        except BaseException as raised:
            error = raised


cdef bint is_inside_threading():
    # A worker that makes itself known may be waiting for what the calling thread holds.
    cdef object is_owned = getattr(threading._active_limbo_lock, "_is_owned", None)
    return is_owned is not None and is_owned()


def _before_fork():
    cdef object error = None
    cdef list mine = forks.setdefault(threading.get_ident(), [])
    mine.append(False)
    with nogil:
        dlrs_hold_new_states()
    if is_inside_threading():
        mine[-1] = _adopting.acquire(False)
    else:
        error = acquire(_adopting)
        mine[-1] = True
    if error is not None:
        raise error


cdef list end_fork():
    # What is left of the forks of this thread.
    cdef list mine = forks.pop(threading.get_ident(), None)
    if mine is None:    # there was no memory for it
        return []
    dlrs_release_new_states()
    if mine.pop():
        _adopting.release()
    return mine


def _after_fork_in_parent():
    cdef list mine = end_fork()
    if mine:
        forks[threading.get_ident()] = mine


def _after_fork_in_child():
    cdef list mine = end_fork()
    forks.clear()
    if mine:
        forks[threading.get_ident()] = mine
    for lock in (_adopting, *_ending_locks):
        if not lock._is_owned():
            lock._at_fork_reinit()


if dlrs_process_prepare() != DLRS_OK:
    raise MemoryError("no memory for a fork handler")
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
