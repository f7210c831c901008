"""A lock that a forked child finds free. Knows nothing of what it guards."""

from __future__ import annotations

import threading

from dataloader_rs._core import process_generation
from dataloader_rs.hints import Any


class ForkSafeLock:
    """A lock of its own in each process that uses it, which the thread that holds it may take again.

    A lock that another thread held during a fork would be held in the child for ever, since that thread is not there.
    """

    def __init__(self) -> None:
        self._of_process: dict[int, Any] = {}

    def here(self) -> Any:
        """The lock of this process, for a ``with`` statement."""
        generation = process_generation()
        lock = self._of_process.get(generation)
        return self._of_process.setdefault(generation, threading.RLock()) if lock is None else lock
