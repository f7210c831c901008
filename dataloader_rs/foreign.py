"""What other libraries' objects are, by a look at what the program has imported: nothing is imported for it."""

from __future__ import annotations

import sys


def is_instance_of(value: object, module: str, name: str) -> bool:
    """Whether `value` is an instance of that class, or of a subclass. False if the module is not imported."""
    kind = getattr(sys.modules.get(module), name, None)
    # By its type: an object may call itself an instance of anything.
    return isinstance(kind, type) and issubclass(type(value), kind)
