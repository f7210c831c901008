"""What is measured: workloads, the settings each runs with, and the figures that come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import measures
import workloads
from contenders import Settings

# Names of settings, by which tables and marks refer to them.
NONE = "no workers"
TWO = "2 workers"
TWO_DEEP = "2 workers, prefetch_depth=64"
FOUR = "4 workers"
FOUR_BY_16 = "4 workers x 16 items"
EIGHT = "8 workers"

SETTINGS = {
    NONE: {},
    TWO: {"num_workers": 2},
    TWO_DEEP: {"num_workers": 2, "prefetch_depth": 64},
    FOUR: {"num_workers": 4},
    FOUR_BY_16: {"num_workers": 4, "items_in_parallel": 16},
    EIGHT: {"num_workers": 8},
}

# Figures of which more is better; of all others less is.
THROUGHPUT = ("items/s",)


@dataclass(frozen=True)
class Workload:
    """One dataset under one way of measuring, with one or several settings.

    Attributes
    ----------
    groups : tuple of str
        What ``CASES=`` selects it by.
    settings : dict of str to Settings
        Settings that alternate within a run, so that each may be compared with each.
    figures : tuple of str
        Names, which are also the units, of what the measure returns.
    seconds : float
        About how long one run takes; the number of items follows from it.
    tiny : int
        Number of items of the size that only shows that everything works.
    shares : bool
        Whether the dataset's vocabulary goes through the loader's ``share``.
    once : bool
        Whether one run without a warm-up says all, because it is no time that is measured.
    """

    name: str
    groups: tuple[str, ...]
    dataset: type
    settings: dict[str, Settings]
    measure: Callable = measures.throughput
    figures: tuple[str, ...] = field(default=THROUGHPUT)
    seconds: float = 0.2
    tiny: int = 11
    shares: bool = False
    once: bool = False


def given(*names: str, **common) -> dict[str, Settings]:
    """The settings with these names, and further arguments that they have in common."""
    return {name: Settings(**SETTINGS[name], **common) for name in names}


def cpu(name: str, group: str, dataset: type, *, batch_size: int = 16, **arguments) -> Workload:
    """A workload that keeps cores busy, so that eight workers on two cores must not be worse than two."""
    collate_fn = None if issubclass(dataset, workloads.Tokens) else workloads.stacked
    return Workload(name, (group, "oversubscribed"), dataset,
                    given(NONE, TWO, EIGHT, batch_size=batch_size, collate_fn=collate_fn), **arguments)


WORKLOADS = [
    Workload("return i, batch 1", ("overhead",), workloads.Ids, given(NONE, TWO, TWO_DEEP, batch_size=1)),
    Workload("return i, batch 32", ("overhead",), workloads.Ids, given(NONE, TWO, TWO_DEEP, batch_size=32)),
    Workload("return i, batch 256", ("overhead",), workloads.Ids, given(NONE, TWO, TWO_DEEP, batch_size=256)),
    Workload("fresh objects", ("fresh",), workloads.FreshObjects, given(NONE, TWO, batch_size=32)),
    Workload("shuffled order", ("shuffle",), workloads.Ids, given(NONE, TWO, batch_size=32, shuffle=True)),
    cpu("files", "files", workloads.ArrayFiles),
    cpu("image decoding", "images", workloads.ImageFiles),
    cpu("augmentation", "augmentation", workloads.Augmentation, batch_size=8, seconds=0.3),
    cpu("tokeniser, one dict", "tokeniser", workloads.Tokens, batch_size=32),
    cpu("tokeniser, dict per thread", "tokeniser", workloads.TokensByThread, batch_size=32),
    cpu("tokeniser, shared dict", "tokeniser", workloads.Tokens, batch_size=32, shares=True),
    Workload("network", ("network",), workloads.Network, given(FOUR_BY_16, batch_size=32), seconds=0.6),
    Workload("__getitems__", ("getitems",), workloads.Table, given(NONE, TWO, batch_size=64)),
    Workload("first batch, cold", ("first",), workloads.Ids, given(NONE, TWO, batch_size=32),
             measures.first_batch_cold, ("ms",)),
    Workload("first batch, warm", ("first",), workloads.Ids, given(NONE, TWO, batch_size=32),
             measures.first_batch_warm, ("ms",)),
    Workload("epoch of 8 batches", ("turn-round",), workloads.Ids, given(NONE, TWO, batch_size=4),
             measures.epoch_turn_round, ("ms",)),
    Workload("hand-over", ("consumer",), workloads.PurePython,
             given(FOUR, batch_size=8, collate_fn=workloads.stamped),
             measures.hand_over, ("p50 ms", "p99 ms"), seconds=0.8),
    Workload("memory after 5,000 batches", ("memory",), workloads.Rows,
             given(NONE, TWO, batch_size=8, collate_fn=workloads.stacked),
             measures.memory, ("MB", "MB grown"), once=True),
    Workload("shuffle of 10^9", ("huge-shuffle",), workloads.Ids, given(NONE, batch_size=256, shuffle=True),
             measures.huge_shuffle, ("start ms", "ns/index", "MB grown")),
]

BY_NAME = {workload.name: workload for workload in WORKLOADS}
GROUPS = sorted({group for workload in WORKLOADS for group in workload.groups})


def chosen(groups: list[str]) -> list[Workload]:
    """The workloads of these groups, of all if there are none; ValueError for a group that does not exist."""
    for group in groups:
        if group not in GROUPS:
            raise ValueError(f"a case must be one of {', '.join(GROUPS)}, got {group}")
    return [workload for workload in WORKLOADS if not groups or set(groups) & set(workload.groups)]
