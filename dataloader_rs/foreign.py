"""What other libraries' objects are, by a look at what the program has imported: nothing is imported for it."""

from __future__ import annotations

import sys

# Where the classes are defined. A module of one's own that is called `datasets` is not that of Hugging Face.
MAP_STYLE = (("torch.utils.data", "Dataset"), ("datasets.arrow_dataset", "Dataset"))
ITERABLE = (("torch.utils.data", "IterableDataset"), ("datasets.iterable_dataset", "IterableDataset"))


def is_instance_of(value: object, module: str, name: str) -> bool:
    """Whether `value` is an instance of that class, or of a subclass. False if the module is not imported."""
    kind = getattr(sys.modules.get(module), name, None)
    # By its type: an object may call itself an instance of anything.
    return isinstance(kind, type) and issubclass(type(value), kind)


def is_foreign_dataset(value: object) -> bool:
    """Whether `value` is a dataset of torch or Hugging Face that is asked by index."""
    return any(is_instance_of(value, *kind) for kind in MAP_STYLE) and not is_foreign_stream(value)


def is_foreign_stream(value: object) -> bool:
    """Whether `value` is a dataset of torch or Hugging Face that is iterated."""
    return any(is_instance_of(value, *kind) for kind in ITERABLE)
