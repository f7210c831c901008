"""Loads that are large in one way each, in any size: `test_load.py` runs small ones, `soak.py load` those in full."""

from __future__ import annotations

import gc
import threading
import time

from conftest import eventually, run_threaded, worker_threads
from rounds import Fault, check_batch, record
from toy_datasets import Calls, Ids

from dataloader_rs import PyDataloader, default_collate, get_worker_info

PATIENCE = 60.0  # only a fault waits for it


def must(condition: object, text: str) -> None:
    if not condition:
        raise Fault(text)


def many_workers(num_workers: int) -> str:
    """One epoch that cannot end before every worker has an item, and one that is left to chance."""
    everybody = threading.Barrier(num_workers)
    seen: set[int] = set()

    def item(index: int) -> int:
        info = get_worker_info()
        assert info is not None
        seen.add(info.id)
        if index < num_workers:
            everybody.wait(PATIENCE)
        return index

    length = 4 * num_workers
    with PyDataloader(Calls(length, item), num_workers=num_workers, adaptive=False) as loader:
        must(sum(loader, []) == list(range(length)), "an epoch of many workers gave other samples")
        must(seen == set(range(num_workers)), f"workers {set(range(num_workers)) - seen} had no item")
    with PyDataloader(Ids(length), 3, num_workers=num_workers) as loader:
        must(sum(loader, []) == list(range(length)), "an epoch of many workers gave other samples")
    return f"{num_workers} workers, all seen, {2 * length} samples"


def many_loaders(num_loaders: int, length: int) -> str:
    """Iterators of as many loaders, which take turns."""
    loaders = [PyDataloader(Calls(length, lambda index, first=number * length: record(first + index)), 1 + number % 7,
                            num_workers=1 + number % 2, in_order=number % 3 > 0) for number in range(num_loaders)]
    iterators = {number: iter(loader) for number, loader in enumerate(loaders)}
    missing = [set(range(number * length, (number + 1) * length)) for number in range(num_loaders)]
    batches = 0
    while iterators:
        for number, iterator in list(iterators.items()):
            batch = next(iterator, None)
            if batch is None:
                del iterators[number]
                continue
            indices = tuple(sample[0] for sample in batch)
            check_batch(batch, indices)
            missing[number].difference_update(indices)
            batches += 1
    lost = sum(map(len, missing))
    must(batches == sum(map(len, loaders)) and lost == 0, f"{batches} batches, {lost} samples lost")
    return f"{num_loaders} loaders at once, {batches} batches, lost: 0"


def many_batches(num_batches: int, num_workers: int) -> str:
    """One epoch of so many batches of one, each in its place."""
    loader = PyDataloader(Ids(num_batches), num_workers=num_workers, prefetch_depth=16)
    total = count = 0
    for number, batch in enumerate(loader):
        if batch != [number]:
            raise Fault(f"batch {number} is {batch}")
        total += batch[0]
        count += 1
    must(count == num_batches and total == num_batches * (num_batches - 1) // 2, f"{count} batches, sum {total}")
    return f"{count} batches through one loader, checksum {total}, lost: 0"


def many_threads(num_threads: int, seconds: float) -> str:
    """Threads that each make loaders, iterate half an epoch, or a whole one, and drop them."""
    before = worker_threads()
    end = time.monotonic() + seconds
    counts = [0] * num_threads

    def hammer(number: int) -> None:
        turn = 0
        while time.monotonic() < end:
            turn += 1
            collate_fn = default_collate if turn % 2 else None
            loader = PyDataloader(Ids(64), 4, num_workers=1 + turn % 3, collate_fn=collate_fn,
                                  across_epochs=turn % 5 == 0, items_in_parallel=1 + (turn % 7 == 0))
            iterator = iter(loader)
            if turn % 4 == 0:
                del loader
            for place in range(16 if turn % 3 == 0 else 8):
                batch = next(iterator)
                must(list(batch) == list(range(4 * place, 4 * place + 4)), f"batch {place} is {batch}")
                counts[number] += 1
            if turn % 50 == 0:
                gc.collect()

    run_threaded(hammer, num_threads)
    must(eventually(lambda: gc.collect() >= 0 and worker_threads() <= before, PATIENCE), "workers are left")
    return f"{num_threads} threads for {seconds:g} s, {sum(counts)} batches in loaders that they dropped, lost: 0"
