"""What a worker, a thread that Python did not start, must do to look like one that it did."""

from __future__ import annotations

import sys
import threading

from dataloader_rs.hints import Any

_threading: Any = threading  # with its private names

# Held while a thread is made known to `threading`, which then holds locks that the child of a fork could not get.
_adopting: Any = threading.RLock()

# From CPython 3.14 on, threads that `threading` did not start, as ours, go through the lock that it had when it was
# imported when they end, also in a child, where it has another. Before, this is empty.
_ending: Any = getattr(_threading, "_DeleteDummyThreadOnDel", object).__dict__.get("__del__")
_ending_locks = tuple(value for value in getattr(_ending, "__defaults__", None) or () if hasattr(value, "_is_owned"))

# Locks of `threading` that are held during a fork, in the order in which they are acquired.
_held_for_fork: tuple[Any, ...] = ()


def adopt_thread(name: str) -> None:
    """Name the calling thread in `threading`, and give it the program's trace and profile functions."""
    with _adopting:
        threading.current_thread().name = name
    trace, profile = threading.gettrace(), threading.getprofile()
    if trace is not None:
        sys.settrace(trace)
    if profile is not None:
        sys.setprofile(profile)


def forget_thread() -> None:
    """Take the calling thread out of `threading` again, before it ends. CPython 3.13 and newer do that themselves.

    The functions of `adopt_thread` go first: what a dying thread drops may run Python code, and a hook that asks for
    `threading.current_thread()` would then register the thread anew. To set them stops all threads of a free-threaded
    interpreter, also where there is nothing to be taken away.
    """
    if sys.gettrace() is not None:
        sys.settrace(None)
    if sys.getprofile() is not None:
        sys.setprofile(None)
    if sys.version_info < (3, 13):
        with _threading._active_limbo_lock:
            _threading._active.pop(threading.get_ident(), None)


def hold_for_fork() -> None:
    """Before a fork: wait until no worker is inside `threading`, and let none enter it.

    The handler of a signal that comes meanwhile may raise; the fork takes place all the same.
    """
    global _held_for_fork
    _adopting.acquire()
    _held_for_fork = (*_ending_locks, _threading._active_limbo_lock)
    for lock in _held_for_fork:
        lock.acquire()


def release_in_parent() -> None:
    """After the fork, in the parent."""
    for lock in (*reversed(_held_for_fork), _adopting):
        if lock._is_owned():
            lock.release()


def release_in_child() -> None:
    """After the fork, in the child, where `threading` has made its lock anew."""
    global _adopting
    release_in_parent()
    _adopting = threading.RLock()
