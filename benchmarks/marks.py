"""The speeds that the loader promises, and whether a run reached them. Knows no processes and no Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import cases
from cases import EIGHT, FOUR, FOUR_BY_16, NONE, TWO, TWO_DEEP
from results import Results
from workloads import Network

# On free-threaded builds without deferred counts, the share of what two bare threads reach.
OF_BARE_THREADS = 0.9
# With workers at most this much slower than without, and what is too small to be worth a thread.
NEVER_SLOWER = 0.95
NEVER_SLOWER_TINY = 0.90
TINY_ITEM_SECONDS = 0.2e-6
GIL_BATCH_SECONDS = 100e-6


@dataclass(frozen=True)
class Mark:
    """A promised figure and the one that was reached, None if there is a `reason` why it was not measured."""

    what: str
    mark: float
    reached: float | None
    unit: str = "x"
    more_is_better: bool = True
    reason: str = ""
    note: str = ""

    @property
    def met(self) -> bool | None:
        if self.reached is None:
            return None
        return self.reached >= self.mark if self.more_is_better else self.reached <= self.mark


def marks(results: Results) -> list[Mark]:
    """All marks that concern this interpreter and the workloads that were run."""
    found = [*no_workers(results), *with_two_workers(results), *network(results), *first_batch(results),
             *oversubscribed(results), *against_torch(results), *hand_over(results), *huge_shuffle(results),
             *never_slower(results)]
    return [mark for workload, mark in found if results.was_run(workload)]


def ratio(results: Results, what: str, mark: float, workload: str, over: tuple[str, str], under: tuple[str, str],
          note: str = "") -> tuple[str, Mark]:
    reached = results.ratio(workload, over, under)
    reason = ""
    if reached is None:
        missing = over if not results.rounds(workload, *over, "items/s") else under
        reason = results.reason(workload, *missing)
    return workload, Mark(what, mark, reached, reason=reason, note=note)


def at_most(results: Results, what: str, mark: float, workload: str, settings: str, figure: str,
            unit: str) -> tuple[str, Mark]:
    reached = results.median(workload, settings, "ours", figure)
    reason = results.reason(workload, settings, "ours") if reached is None else ""
    return workload, Mark(what, mark, reached, unit, more_is_better=False, reason=reason)


def no_workers(results: Results) -> Iterator[tuple[str, Mark]]:
    for batch_size, mark in ((1, 1.1), (32, 1.4), (256, 1.5)):
        workload = f"return i, batch {batch_size}"
        yield ratio(results, f"{workload}, no workers, against the Rust wheel", mark, workload,
                    (NONE, "ours"), (NONE, "rust"))


def with_two_workers(results: Results) -> Iterator[tuple[str, Mark]]:
    for workload, settings, gil, free_threaded in (
        ("return i, batch 32", TWO, 0.45, 0.9),
        ("return i, batch 32", TWO_DEEP, 0.8, None),
        ("return i, batch 1", TWO, 0.06, 0.3),
        ("fresh objects", TWO, 0.7, 1.3),
        ("files", TWO, 1.0, 1.95),
        ("augmentation", TWO, 1.9, 1.95),
        ("tokeniser, dict per thread", TWO, 0.95, 1.85),
        ("tokeniser, shared dict", TWO, None, 1.85),
    ):
        mark = gil if results.has_gil else free_threaded
        if mark is not None:
            mark, note = lowered(results, workload, mark)
            yield ratio(results, f"{workload}, {settings} against none", mark, workload,
                        (settings, "ours"), (NONE, "ours"), note)


def lowered(results: Results, workload: str, mark: float) -> tuple[float, str]:
    """The mark of a free-threaded build without deferred counts, where the interpreter sets a lower limit."""
    limit = results.ratio(workload, (TWO, "bare"), (NONE, "bare"))
    if results.has_gil or results.defers_counts or limit is None:
        return mark, ""
    return min(mark, OF_BARE_THREADS * limit), f"two bare threads: {limit:.2f}"


def network(results: Results) -> Iterator[tuple[str, Mark]]:
    settings = cases.BY_NAME["network"].settings[FOUR_BY_16]
    limit = settings.num_workers * settings.items_in_parallel / Network.seconds_per_item
    reached = results.median("network", FOUR_BY_16, "ours")
    reason = results.reason("network", FOUR_BY_16, "ours") if reached is None else ""
    yield "network", Mark(f"network, {FOUR_BY_16}, share of the limit", 0.97,
                          None if reached is None else reached / limit, reason=reason)


def first_batch(results: Results) -> Iterator[tuple[str, Mark]]:
    for workload, mark in (("first batch, cold", 0.4), ("first batch, warm", 0.1)):
        yield at_most(results, f"{workload}, {TWO}", mark, workload, TWO, "ms", "ms")


def oversubscribed(results: Results) -> Iterator[tuple[str, Mark]]:
    for workload in cases.chosen(["oversubscribed"]):
        yield ratio(results, f"{workload.name}, {EIGHT} against 2", 0.95, workload.name,
                    (EIGHT, "ours"), (TWO, "ours"))


def against_torch(results: Results) -> Iterator[tuple[str, Mark]]:
    heavy = 1.5 if results.has_gil else 5
    for workload, settings, mark in (
        ("return i, batch 32", TWO, 15), ("network", FOUR_BY_16, 15), ("files", TWO, heavy),
        ("augmentation", TWO, heavy),
    ):
        yield ratio(results, f"{workload}, {settings}, against torch", mark, workload,
                    (settings, "ours"), (settings, "torch"))


def hand_over(results: Results) -> Iterator[tuple[str, Mark]]:
    if results.has_gil:
        yield at_most(results, f"hand-over beside {FOUR}, p99", 1.0, "hand-over", FOUR, "p99 ms", "ms")


def huge_shuffle(results: Results) -> Iterator[tuple[str, Mark]]:
    for what, mark, figure, unit in (("start", 1.0, "start ms", "ms"), ("cost of an index", 25, "ns/index", "ns"),
                                     ("memory that grows", 1.0, "MB grown", "MB")):
        yield at_most(results, f"shuffle of 10^9, {what}", mark, "shuffle of 10^9", NONE, figure, unit)


def never_slower(results: Results) -> Iterator[tuple[str, Mark]]:
    """Workers cost at most a few percent, wherever there is enough to do for them."""
    for workload in cases.WORKLOADS:
        if workload.figures != cases.THROUGHPUT or not {NONE, TWO} <= set(workload.settings):
            continue
        alone = results.median(workload.name, NONE, "ours")
        batch_size = workload.settings[NONE].batch_size
        if alone is None or batch_size == 1 or (results.has_gil and batch_size / alone < GIL_BATCH_SECONDS):
            continue
        mark = NEVER_SLOWER_TINY if not results.has_gil and 1 / alone < TINY_ITEM_SECONDS else NEVER_SLOWER
        mark, note = lowered(results, workload.name, mark)
        yield ratio(results, f"{workload.name}, {TWO} never slower than none", mark, workload.name,
                    (TWO, "ours"), (NONE, "ours"), note)
