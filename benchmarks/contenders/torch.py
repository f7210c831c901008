"""`torch.utils.data.DataLoader` with workers that stay, and batches that stay what they are."""

from __future__ import annotations

from torch.utils.data import DataLoader

from contenders import Settings

DISTRIBUTIONS = ("torch",)
BASE = object


def refuses(workload, settings: Settings) -> str:
    return ""


def as_it_is(samples: list) -> list:
    """Instead of torch's own collation into tensors, which no other contender does."""
    return samples


def make_loader(dataset, settings: Settings) -> DataLoader:
    workers = settings.num_workers
    arguments: dict[str, object] = {}
    if workers:
        # Counted for each worker, and with the batch in progress.
        arguments = {"prefetch_factor": -(-(workers + settings.prefetch_depth) // workers), "persistent_workers": True}
    return DataLoader(dataset, batch_size=settings.batch_size, shuffle=settings.shuffle, num_workers=workers,
                      collate_fn=settings.collate_fn or as_it_is, **arguments)
