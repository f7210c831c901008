"""Arguments that are there for who comes from torch: what they may be, and what they mean here."""

from __future__ import annotations

from collections.abc import Callable

from dataloader_rs.arguments import checked_count
from dataloader_rs.errors import shown, type_name
from dataloader_rs.foreign import is_instance_of
from dataloader_rs.hints import Any

DEFAULT_PREFETCH_DEPTH = 2
START_METHODS = ("fork", "spawn", "forkserver")


def checked_prefetch_factor(prefetch_factor: object, prefetch_depth: int) -> int:
    factor = checked_count("prefetch_factor", prefetch_factor, least=1)
    if prefetch_depth != DEFAULT_PREFETCH_DEPTH:
        raise ValueError(f"prefetch_factor and prefetch_depth are mutually exclusive, "
                         f"got prefetch_factor={shown(factor)} and prefetch_depth={shown(prefetch_depth)}")
    return factor


def depth_of_prefetch_factor(prefetch_factor: int, num_workers: int) -> int:
    """The `prefetch_depth` with which as many batches are in progress or waiting as torch would have, 0 or more."""
    return (prefetch_factor - 1) * num_workers


def checked_multiprocessing_context(context: object) -> object:
    if issubclass(type(context), str):
        if context not in START_METHODS:
            raise ValueError(f"multiprocessing_context must be one of {', '.join(START_METHODS)}, got {shown(context)}")
    elif not is_instance_of(context, "multiprocessing.context", "BaseContext"):
        raise TypeError(f"multiprocessing_context must be the name of a start method, a multiprocessing context or "
                        f"None, got {shown(context)} ({type_name(context)})")
    return context


def resolve_collate(collate_fn: object) -> Callable[[Any], Any] | None:
    """The function that an argument `collate_fn` means: a callable itself, ``"torch"`` torch's own; None is None.

    Raises
    ------
    ValueError, TypeError
        If it is another string, or nothing of these.
    ImportError
        If it is ``"torch"``, and torch cannot be imported.
    """
    if collate_fn is None or callable(collate_fn):
        return collate_fn
    rule = f'collate_fn must be callable, None or "torch", got {shown(collate_fn)}'
    if not issubclass(type(collate_fn), str):
        raise TypeError(f"{rule} ({type_name(collate_fn)})")
    if collate_fn != "torch":
        raise ValueError(rule)
    try:
        from torch.utils.data import default_collate as torch_collate
    except ImportError as error:
        raise ImportError(f'collate_fn="torch" needs torch, which cannot be imported: {error}') from error
    function: Callable[[Any], Any] = torch_collate
    return function


def checked_device(name: str, device: Any) -> str:
    if not issubclass(type(device), str):
        raise TypeError(f"{name} must be a str, got {shown(device)} ({type_name(device)})")
    checked: str = device
    return checked
