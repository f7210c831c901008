"""share() prepares lookup tables that many threads read. What it does to a single object is in ``_freethreading.h``."""

from __future__ import annotations

from collections.abc import Callable

from dataloader_rs._share import FREE_THREADED, defer, is_immortal, is_instance, make_immortal
from dataloader_rs.arguments import checked_flag
from dataloader_rs.hints import Any, TypeVar

T = TypeVar("T")

# On the stack of `walk`: the tuple or frozenset below it has been looked into.
LOOKED_INTO = object()


def share(obj: T, *, immortal: bool = False) -> T:
    """Prepare a lookup table for being read by many threads, on free-threaded Python.

    There, threads that touch the same object contend for its reference count. This spares them the counting, for the
    table and whatever it holds. On builds with the GIL it does nothing at all.

    Parameters
    ----------
    obj : object
        The table: dicts, lists, tuples, sets and frozensets, of subclasses too, nested to any depth and in any way,
        with their keys and items. Their reference counts are *deferred* on CPython 3.14 and newer, and so are those
        of instances of Python classes in them. Instances are not looked into: call ``share(vars(obj))`` if you mean
        what is in there. All other objects, such as arrays, are left alone.
    immortal : bool
        Also make the leaves immortal, keys and values alike: objects whose type is exactly `str`, `int`, `float`,
        `complex` or `bytes`, and tuples and frozensets of immortal objects. Strings are interned on the way.

    Returns
    -------
    object
        `obj` itself. No value, no identity and no order in it changes.

    Raises
    ------
    TypeError
        If `immortal` is no bool.

    Notes
    -----
    What is deferred is freed by the garbage collector only, not when its last reference goes; with the collector
    switched off, never. What is immortal is **never freed**, not even when the table is: use it for what lives as long
    as the process, and not for tables that come and go. Neither can be undone. A second call finds all done and
    costs one walk, of about half a microsecond an object.

    *Thread safety.* Call it on the thread that made the table, and before others use it. Other threads may read the
    table meanwhile; none may change it, since what is walked is then neither the old table nor the new one, or the
    walk ends in a RuntimeError. A leaf that another thread made cannot be made immortal soundly and is left as it is,
    so a table that was loaded on another thread should be shared there. No ``__eq__``, ``__hash__``, ``__iter__`` or
    other code of the table's objects is run.

    3.13t knows no deferred counts: threads contend for the containers themselves there.

    Examples
    --------
    >>> from dataloader_rs import share
    >>> vocabulary = {"the": 0, "cat": 1}
    >>> share(vocabulary, immortal=True) is vocabulary
    True
    """
    immortal = checked_flag("immortal", immortal)
    if FREE_THREADED:
        walk(obj, defer, make_immortal if immortal else None)
    return obj


def walk(root: object, defer: Callable[[Any], None], make_immortal: Callable[[Any], bool] | None) -> None:
    """Call `defer` for each container and instance, and `make_immortal` for each leaf, that can be reached.

    Parameters
    ----------
    root : object
        What `share` got.
    defer : callable
        Called once for each dict, list, set and instance, and for each tuple and frozenset that is not made immortal.
    make_immortal : callable or None
        Called for each leaf, as often as it is met, and once for each tuple or frozenset of nothing but immortal
        objects, inner ones first. Returns whether the object is immortal now.
    """
    # By id, since hashing and comparing may be code of the user. The values keep the ids from being given away again.
    seen: dict[int, object] = {}
    stack = [root]
    while stack:
        obj: Any = stack.pop()
        kind = type(obj)
        if kind is str or kind is int or kind is float or kind is bytes or kind is complex:
            if make_immortal is not None:
                make_immortal(obj)
            continue
        if obj is LOOKED_INTO:
            obj = stack.pop()
            if make_immortal is None or not all(map(is_immortal, obj)) or not make_immortal(obj):
                defer(obj)
            continue
        if id(obj) in seen:
            continue
        # The methods are those of the base, because a subclass may answer anything.
        if issubclass(kind, dict):
            stack.extend(dict.keys(obj))
            stack.extend(dict.values(obj))
        elif issubclass(kind, list):
            stack.extend(list.__iter__(obj))
        elif issubclass(kind, set):
            stack.extend(set.__iter__(obj))
        elif issubclass(kind, tuple) or issubclass(kind, frozenset):
            base: Any = tuple if issubclass(kind, tuple) else frozenset
            if kind is base:
                seen[id(obj)] = obj
                stack += (obj, LOOKED_INTO)
                stack.extend(base.__iter__(obj))
                continue
            stack.extend(base.__iter__(obj))
        elif not is_instance(obj):
            continue
        seen[id(obj)] = obj
        defer(obj)
