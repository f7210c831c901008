"""The number of an epoch, and who is told of it. Knows neither orders nor threads."""

from __future__ import annotations

from dataloader_rs._core import Counter
from dataloader_rs.hints import Any

EPOCH_END = 2**64


class EpochNumbers:
    """Counts epochs from 0, or from where it was set to.

    Notes
    -----
    *Thread safety.* Any thread may call; no two get the same number, unless it was set in between. There is no lock,
    which a forked child might find held.
    """

    def __init__(self) -> None:
        # Replaced as a whole, so that who takes a number sees the old start or the new one.
        self._start = (0, Counter())

    def take(self) -> int:
        """The number of the epoch that starts."""
        first, started = self._start
        return (first + started.take()) % EPOCH_END

    def set(self, epoch: int) -> None:
        """Let the next epoch be number `epoch`."""
        self._start = (epoch, Counter())


def is_told_epochs(receiver: object) -> bool:
    """Whether the class of `receiver` has a ``set_epoch``; some objects answer every attribute."""
    return callable(getattr(type(receiver), "set_epoch", None))


def tell_epoch(receiver: Any, epoch: int) -> None:
    """Call ``receiver.set_epoch(epoch)`` if it has that."""
    if is_told_epochs(receiver):
        receiver.set_epoch(epoch)
