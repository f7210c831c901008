"""This checkout."""

from __future__ import annotations

import dataloader_rs
from dataloader_rs import PyDataloader, PyDataset

from contenders import Settings

DISTRIBUTIONS = ()
BASE = PyDataset

if hasattr(dataloader_rs, "share"):
    def share(obj: object) -> object:
        return dataloader_rs.share(obj, immortal=True)


def refuses(workload, settings: Settings) -> str:
    return ""


def make_loader(dataset, settings: Settings) -> PyDataloader:
    return PyDataloader(
        dataset, batch_size=settings.batch_size, num_workers=settings.num_workers,
        prefetch_depth=settings.prefetch_depth, items_in_parallel=settings.items_in_parallel,
        shuffle=settings.shuffle, collate_fn=settings.collate_fn)
