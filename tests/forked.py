"""Waiting for a forked child. Used by scripts that run in a process of their own, so it imports nothing of pytest."""

from __future__ import annotations

import os
import signal
import time


def wait_for(child: int, status: int = 0, patience: float = 15) -> None:
    """Wait until a child ends, which must be with this exit status, and within `patience` seconds."""
    deadline = time.monotonic() + patience
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGABRT)  # faulthandler shows where it hangs
            os.waitpid(child, 0)
            raise AssertionError("the forked child hangs")
        time.sleep(0.002)
    assert ended == (child, status << 8), ended
