"""What a worker, a thread that Python did not start, must do to look like one that it did."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

from dataloader_rs.hints import Any

_threading: Any = threading  # with its private names


def _locks_of_ending_threads() -> Iterator[Any]:
    """What threads that `threading` did not start, as ours, go through when they end, if that may be another lock.

    From CPython 3.14 on it is the one that `threading` had when it was imported, and in the child of a fork it has
    another. If a thread of the parent held the old one at a fork that was before this import, it is held for ever.
    """
    ending = getattr(_threading, "_DeleteDummyThreadOnDel", object).__dict__.get("__del__")
    for lock in getattr(ending, "__defaults__", None) or ():
        if not hasattr(lock, "_at_fork_reinit"):
            continue
        if lock is not _threading._active_limbo_lock:
            if lock.acquire(timeout=1):
                lock.release()
            else:
                lock._at_fork_reinit()
        yield lock


ending_locks: tuple[Any, ...] = tuple(_locks_of_ending_threads())


def import_what_shows_errors() -> None:
    """Import the modules in which CPython 3.13 and newer print an error that nobody catches.

    It imports them when it comes to that, and then beside workers that go on with the user's code: with two of them in
    a loop in Python the message took 0.55 s on 3.13, and 10 s on 3.13t on a busy machine.
    """
    if sys.version_info >= (3, 13):
        try:
            import ast  # noqa: F401
            import tokenize  # noqa: F401
            import traceback

            getattr(traceback, "_colorize", None)  # which CPython 3.15 imports when it is first asked for
        except ImportError:
            pass  # the interpreter ends


def adopt_thread(name: str) -> None:
    """Name the calling thread in `threading`, and give it the program's trace and profile functions."""
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
