"""One picture of a run: items per second of every contender, on a logarithmic scale."""

from __future__ import annotations

from pathlib import Path

import cases
from report import number, title
from results import Results

SHOWN = (cases.NONE, cases.TWO, cases.FOUR_BY_16)
COLOURS = {"plain": "#9e9e9e", "bare": "#d0d0d0", "torch": "#ee7733", "rust": "#cc3311", "spdl": "#009988",
           "ours": "#0077bb"}


def draw(results: Results, path: Path) -> None:
    """Write the chart as PNG. ModuleNotFoundError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [(workload.name, settings) for workload in cases.WORKLOADS if workload.figures == cases.THROUGHPUT
            for settings in workload.settings if settings in SHOWN
            and results.median(workload.name, settings, "ours") is not None]
    names = results.present
    thickness = 0.8 / max(len(names), 1)
    figure, axes = pyplot.subplots(figsize=(10, 1.5 + 0.16 * len(rows) * (len(names) + 1)), layout="constrained")
    for place, name in enumerate(names):
        for row, (workload, settings) in enumerate(rows):
            median = results.median(workload, settings, name)
            if median is None:
                continue
            values = results.rounds(workload, settings, name, "items/s")
            at = row + (place - (len(names) - 1) / 2) * thickness
            axes.barh(at, median, thickness, color=COLOURS[name],
                      xerr=[[median - min(values)], [max(values) - median]], error_kw={"elinewidth": 0.7})
            axes.annotate(number(median), (max(values), at), (3, 0), textcoords="offset points", va="center",
                          fontsize=6)
    axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), [f"{workload}\n{settings}" for workload, settings in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("items per second: median of all rounds, with the least and the greatest")
    axes.set_title(f"{title(results)}, {results.data['machine']['cores']} cores")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(handles=[pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[name], label=name) for name in names],
                loc="lower left", bbox_to_anchor=(0, 1.02), ncols=len(names), frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
