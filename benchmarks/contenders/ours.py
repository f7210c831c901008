"""This checkout."""

from __future__ import annotations

import dataloader_rs
from contenders.interface import BASE, make_loader, refuses  # noqa: F401 - the interface of a contender

DISTRIBUTIONS = ()

if hasattr(dataloader_rs, "share"):
    def share(obj: object) -> object:
        return dataloader_rs.share(obj, immortal=True)
