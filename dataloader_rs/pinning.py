"""pin_memory: batches of tensors are copied to page-locked memory, from where a device fetches them by itself. Knows
torch only if the user has imported it, and no threads."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence

from dataloader_rs.containers import container_like
from dataloader_rs.hints import Any

# What RuntimeErrors of torch say, of different versions, where there is nothing to pin memory for.
NO_DEVICE = (
    "accelerator device when none is available",
    "need to provide pin_memory allocator",
    "no nvidia driver",
    "aten::_pin_memory' with arguments from the 'cpu' backend",
)

# Types that hold nothing to pin, and are met most.
PLAIN = frozenset({str, bytes, int, float, bool, complex, type(None)})

# Taken by the one thread that warns, and never given back.
_warned = threading.Lock()


def pinned_collate(collate_fn: Callable[[list[Any]], Any] | None) -> Callable[[list[Any]], Any]:
    """A `collate_fn` that pins what `collate_fn` returns, on the thread that calls it; None stands for the list."""

    def collate(samples: list[Any]) -> Any:
        return pin(samples if collate_fn is None else collate_fn(samples))

    return collate


def pin(batch: Any) -> Any:
    """Pin the memory of all tensors in a batch.

    Parameters
    ----------
    batch : object
        Whatever has a method ``pin_memory()``, as tensors have, is replaced by what that returns: in mappings,
        sequences and named tuples as well, nested to any depth.

    Returns
    -------
    object
        The batch. Containers in which something was replaced are new ones of the same type. All else is what it was,
        and the very same object.

    Warns
    -----
    RuntimeWarning
        Once in the life of the process, if there is no device to pin memory for. Batches are then left as they are.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        _warn_once("torch is not imported")
        return batch
    if not _has_device(torch):
        _warn_once("torch finds no accelerator")
        return batch
    try:
        return _pinned(batch)
    except RuntimeError as error:
        message = str(error).lower()
        if not any(text in message for text in NO_DEVICE):
            raise
        _warn_once(f"torch says: {str(error).splitlines()[0]}")
        return batch


def _pinned(value: Any) -> Any:
    kind: Any = type(value)
    if kind in PLAIN:
        return value
    if callable(getattr(kind, "pin_memory", None)):
        return value.pin_memory()
    if isinstance(value, (str, bytes, bytearray, memoryview, range)):
        return value
    if isinstance(value, Mapping):
        pinned = {key: _pinned(part) for key, part in value.items()}
        changed = [key for key, part in value.items() if pinned[key] is not part]
        return container_like(value, pinned, changed, MutableMapping) if changed else value
    if isinstance(value, Sequence):
        parts = [_pinned(part) for part in value]
        changed = [position for position, part in enumerate(value) if parts[position] is not part]
        return container_like(value, parts, changed, MutableSequence) if changed else value
    return value


def _has_device(torch: Any) -> bool:
    """Is there a device that can fetch from pinned memory? Those of Apple share the memory of the processor."""
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_available():
        return True
    accelerator = getattr(torch, "accelerator", None)
    return accelerator is not None and accelerator.is_available() and accelerator.current_accelerator().type != "mps"


def _warn_once(reason: str) -> None:
    if _warned.acquire(blocking=False):
        warnings.warn(f"pin_memory=True has no effect, batches are left as they are: {reason}", RuntimeWarning,
                      stacklevel=4)
