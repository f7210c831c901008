"""The threads of this process, as Linux lists them."""

from __future__ import annotations

import os


def num_threads() -> int:
    """How many threads the process has, those that Python knows nothing of included."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))


def thread_ids() -> list[str]:
    """The native ids of all threads that run. A single listing may leave some out while others end."""
    while True:
        before = num_threads()
        # Without pathlib, which interns each part of a path: free-threaded Python never frees what is interned.
        found = os.listdir("/proc/self/task")
        if len(found) == before == num_threads():
            return found


def status_of(thread_id: str) -> dict[str, str]:
    """What Linux says of a thread; nothing once it has ended."""
    try:
        with open(f"/proc/self/task/{thread_id}/status") as status:
            return {key: value.strip() for key, value in (line.split(":", 1) for line in status)}
    except OSError:
        return {}


def statuses_of_workers() -> dict[str, dict[str, str]]:
    """The same of all threads whose name says that they are workers of a loader, by native id."""
    found = {thread: status_of(thread) for thread in thread_ids()}
    return {thread: status for thread, status in found.items() if status.get("Name", "").startswith("dlrs-")}
