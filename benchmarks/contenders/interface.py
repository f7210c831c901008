"""What the Rust version and this checkout have in common: import name and interface. The environment says which it is,
and neither is imported beside the other."""

from __future__ import annotations

from contenders import Settings
from dataloader_rs import PyDataloader, PyDataset

BASE = PyDataset


def refuses(workload, settings: Settings) -> str:
    return ""


def make_loader(dataset, settings: Settings) -> PyDataloader:
    return PyDataloader(
        dataset, batch_size=settings.batch_size, num_workers=settings.num_workers,
        prefetch_depth=settings.prefetch_depth, items_in_parallel=settings.items_in_parallel,
        shuffle=settings.shuffle, collate_fn=settings.collate_fn)
