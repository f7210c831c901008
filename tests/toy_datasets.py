"""Datasets for the tests: each does one thing, and waits on gates instead of sleeping."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

from dataloader_rs import PyDataset

# Longer than anything here takes; only a fault waits for it.
PATIENCE = 20.0 * float(os.environ.get("DLRS_SLOWDOWN", "1"))


class Ids(PyDataset[int]):
    """``dataset[i]`` is i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Calls(Ids):
    """``dataset[i]`` is what a function returns for i. Functions keep what they close over alive; objects do not."""

    def __init__(self, length: int, function) -> None:
        super().__init__(length)
        self.function = function

    def __getitem__(self, index: int):
        return self.function(index)


class CountingDataset(Ids):
    """Knows which items were asked for, in the order of the calls, and how many calls were under way at most."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.changed = threading.Condition()
        self.started: list[int] = []
        self.running = 0
        self.most_running = 0

    def __getitem__(self, index: int) -> int:
        with self.changed:
            self.started.append(index)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            self.changed.notify_all()
        try:
            return self.fetch(index)
        finally:
            with self.changed:
                self.running -= 1
                self.changed.notify_all()

    def fetch(self, index: int) -> int:
        return index

    def wait_until_started(self, indices: Iterable[int]) -> None:
        """Wait until all of `indices` have been asked for."""
        wanted = set(indices)
        with self.changed:
            if not self.changed.wait_for(lambda: wanted <= set(self.started), PATIENCE):
                raise TimeoutError(f"items {wanted - set(self.started)} were not asked for")


class GatedDataset(CountingDataset):
    """Items in `closed` are not returned before ``open()`` lets them."""

    def __init__(self, length: int, closed: Iterable[int]) -> None:
        super().__init__(length)
        self.gates = {index: threading.Event() for index in closed}

    def fetch(self, index: int) -> int:
        gate = self.gates.get(index)
        if gate is not None and not gate.wait(PATIENCE):
            raise TimeoutError(f"the gate of item {index} was not opened")
        return index

    def open(self, *indices: int) -> None:
        """Open the gates of `indices`, or all."""
        for index in indices or self.gates:
            self.gates[index].set()


class FailingDataset(Ids):
    """Raises ``errors[i]`` for item i."""

    def __init__(self, length: int, errors: dict[int, BaseException]) -> None:
        super().__init__(length)
        self.errors = errors

    def __getitem__(self, index: int) -> int:
        if index in self.errors:
            raise self.errors[index]
        return index
