"""That there is a main interpreter, and whether this is it. Asked before an extension module is loaded: such a module
works for the first interpreter of the process that tries to load it, and for no other from then on, also if it refused
to work there. Knows nothing of threads."""

from __future__ import annotations

import _thread
import sys


def is_main_interpreter() -> bool:
    """Whether this is the main interpreter of the process, as far as that can be said."""
    if sys.version_info >= (3, 13):
        ask = getattr(_thread, "_is_main_interpreter", None)
        return ask is None or bool(ask())
    try:
        import _xxsubinterpreters as interpreters  # type: ignore[import-not-found]
    except ImportError:
        return True  # built without subinterpreters in Python
    return bool(interpreters.get_current() == interpreters.get_main())


def require_main_interpreter() -> None:
    """Raise an ImportError in a subinterpreter."""
    if not is_main_interpreter():
        raise ImportError("dataloader_rs works in the main interpreter only", name="dataloader_rs")
