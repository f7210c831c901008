# The hooks of a fork, for NOTE [ steps and forks ] in _fork.h, so that the child finds nothing of ours held by a thread
# that is not there.
#
# None of this is Python code: the handler of a signal, which may raise, could run before any line of that, and what was
# begun then would never end. So a signal that comes while a fork waits is handled when os.fork() has returned.
#
# No lock of others is held. Hooks of others run meanwhile, those that were registered before ours, and what they wait
# for may need it: that of `threading` is needed wherever a thread starts or ends. The child makes such locks anew.

import os
import threading

from dataloader_rs.threads import ending_locks as _ending_locks


cdef bint is_inside_threading():
    # A worker that makes itself known may be waiting for what the calling thread holds.
    cdef object is_owned = getattr(threading._active_limbo_lock, "_is_owned", None)
    return is_owned is not None and is_owned()


def _before_fork():
    cdef bint waits = not is_inside_threading()
    with nogil:
        dlrs_begin_fork(waits)


def _after_fork_in_parent():
    dlrs_end_fork()


def _after_fork_in_child():
    for lock in _ending_locks:
        if not lock._is_owned():
            lock._at_fork_reinit()


if dlrs_process_prepare() != DLRS_OK or dlrs_prepare_forks() != 0:
    raise MemoryError("no memory for a fork handler")
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
