"""Making a container of the same type as another, with other things in it."""

from __future__ import annotations

import copy
from collections.abc import Iterable

from dataloader_rs.hints import Any


def container_like(value: Any, parts: Any, changed: Iterable[Any], mutable: type) -> Any:
    """A container like `value` that holds `parts`, which differ from its own in the places that are `changed`.

    Parameters
    ----------
    value : mapping or sequence
    parts : dict or list
        Returned as it is where nothing like `value` can be made of it; as a tuple, for a tuple.
    changed : iterable
        Of keys or positions.
    mutable : type
        MutableMapping or MutableSequence.
    """
    kind: Any = type(value)
    if kind is type(parts):
        return parts
    if hasattr(kind, "_make"):
        return kind._make(parts)
    try:
        if not isinstance(value, mutable):
            return kind(parts)
        result: Any = copy.copy(value)  # it may have more than its parts, such as the factory of a defaultdict
        if result is not value:
            for place in changed:  # not update(), which adds up in a Counter
                result[place] = parts[place]
            return result
    except TypeError:  # neither is promised of a container
        pass
    return tuple(parts) if issubclass(kind, tuple) else parts
