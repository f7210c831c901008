"""``generator=``: which objects generate random numbers, and how the key of an epoch's order is drawn from them."""

from __future__ import annotations

import sys
from collections.abc import Callable

from dataloader_rs.arguments import checked_uint64
from dataloader_rs.errors import shown, type_name
from dataloader_rs.foreign import is_instance_of
from dataloader_rs.hints import TYPE_CHECKING, Any
from dataloader_rs.locks import ForkSafeLock

if TYPE_CHECKING:
    import random

# One for all generators, as several loaders may share one.
_drawing = ForkSafeLock()


def checked_generator(generator: object) -> object:
    if _draw_of(generator) is None:
        raise TypeError(f"generator must be a numpy.random.Generator, random.Random, torch.Generator or None, "
                        f"got {shown(generator)} ({type_name(generator)})")
    return generator


def draw_key(generator: object) -> int:
    """Draw one number, ``0 <= number < 2**64``.

    Parameters
    ----------
    generator : numpy.random.Generator, random.Random or torch.Generator

    Raises
    ------
    TypeError, ValueError
        If a subclass of these draws something else.

    Notes
    -----
    *Thread safety.* Any thread may call; generators are entered by one at a time.
    """
    draw = _draw_of(generator)
    assert draw is not None
    with _drawing.here():
        number = draw(generator)
    return checked_uint64("what generator draws", number)


def _draw_of(generator: object) -> Callable[[Any], Any] | None:
    for module, name, draw in KINDS:
        if is_instance_of(generator, module, name):
            return draw
    return None


def _from_numpy(generator: Any) -> Any:  # a subclass may draw something else
    return generator.integers(0, 2**64 - 1, endpoint=True, dtype="uint64")


def _from_random(generator: random.Random) -> int:
    return generator.getrandbits(64)


def _from_torch(generator: Any) -> int:
    torch = sys.modules["torch"]
    # A generator draws on its own device only, which need not be the default one.
    number = torch.empty((), dtype=torch.int64, device=generator.device)
    return int(number.random_(-2**63, None, generator=generator).item()) % 2**64


KINDS = (("numpy.random", "Generator", _from_numpy), ("random", "Random", _from_random),
         ("torch", "Generator", _from_torch))
