"""The limit: bare threads that make the same calls and share only the dataset. They hand nothing over."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from contenders import Settings, batch_fetcher, order_of

try:
    from contenders.ours import share  # noqa: F401 - part of the interface
except ImportError:  # it is no loader's offer alone: what it does for the limit belongs to the picture
    pass

DISTRIBUTIONS = ()
BASE = object


def refuses(workload, settings: Settings) -> str:
    if workload.figures != ("items/s",):
        return "hands nothing over"
    if settings.items_in_parallel > 1:
        return "has one request in flight for each thread"
    return "has no common order" if settings.shuffle else ""


class Bare:
    def __init__(self, dataset, settings: Settings) -> None:
        self.dataset = dataset
        self.settings = settings

    def __iter__(self) -> Iterator[object]:
        length, size = len(self.dataset), self.settings.batch_size
        fetch = batch_fetcher(self.dataset, self.settings)
        num_threads = max(self.settings.num_workers, 1)
        errors = []

        def work(first: int) -> None:
            try:
                order = order_of(length, self.settings)
                for start in range(first * size, length, num_threads * size):
                    fetch(list(order[start:start + size]))
            except BaseException as error:
                errors.append(error)

        if self.settings.num_workers == 0:
            work(0)
        else:
            threads = [threading.Thread(target=work, args=(first,)) for first in range(num_threads)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
        return iter(())


def make_loader(dataset, settings: Settings) -> Bare:
    return Bare(dataset, settings)
