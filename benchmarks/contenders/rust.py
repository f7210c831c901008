"""dataloader-rs 0.2.0, the Rust version of this interface, whose import name is ours as well."""

from __future__ import annotations

from dataloader_rs import PyDataloader, PyDataset

from contenders import Settings

DISTRIBUTIONS = ("dataloader-rs",)
BASE = PyDataset


def refuses(workload, settings: Settings) -> str:
    return ""


def make_loader(dataset, settings: Settings) -> PyDataloader:
    return PyDataloader(
        dataset, batch_size=settings.batch_size, num_workers=settings.num_workers,
        prefetch_depth=settings.prefetch_depth, items_in_parallel=settings.items_in_parallel,
        shuffle=settings.shuffle, collate_fn=settings.collate_fn)
