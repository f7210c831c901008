"""dataloader-rs 0.2.0, the Rust version of this interface, whose import name is ours as well."""

from __future__ import annotations

from contenders.interface import BASE, make_loader, refuses  # noqa: F401 - the interface of a contender

DISTRIBUTIONS = ("dataloader-rs",)
