# What is held while the process forks, so that the child finds nothing held by a thread that is not there.
#
# None of this is Python code: the handler of a signal, which may raise, could run before any line of that, and what is
# held then would be held for ever. Handlers run inside a wait for a lock, or when os.fork() has returned.

import os
import threading

from dataloader_rs.threads import adopting, ending_locks


# Of each fork that is under way, the innermost last: the locks that it holds. Only who holds them looks.
cdef list held_for_fork = []


cdef object acquire(lock):
    # Acquire it in any case. What a handler has raised meanwhile, or None.
    cdef object error = None
    while True:
        try:
            lock.acquire()
            return error
        except BaseException as raised:
            error = raised


cdef void release_held():
    if held_for_fork:   # else there was no memory for the list
        for lock in reversed(<tuple>held_for_fork.pop()):
            lock.release()


def _before_fork():
    cdef object error = None
    cdef object active = threading._active_limbo_lock
    cdef tuple locks = (*ending_locks, active)
    # Who forks inside `threading` has a lock that a worker which makes itself known may be waiting for.
    if not active._is_owned():
        locks = (adopting, *locks)
    for lock in locks:
        error = acquire(lock) or error
    held_for_fork.append(locks)
    with nogil:
        dlrs_hold_new_states()
    if error is not None:
        raise error


def _after_fork_in_parent():
    dlrs_release_new_states()
    release_held()


def _after_fork_in_child():
    dlrs_release_new_states()
    release_held()
    if not adopting._is_owned():
        adopting._at_fork_reinit()


if dlrs_process_prepare() != DLRS_OK:
    raise MemoryError("no memory for a fork handler")
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
