"""One picture of a run: items per second of every contender, on a logarithmic scale."""

from __future__ import annotations

from pathlib import Path

import cases
from report import title
from results import Results

SHOWN = (cases.NONE, cases.TWO, cases.FOUR_BY_16)
COLOURS = {"plain": "#777777", "bare": "#bbbbbb", "torch": "#ee7733", "rust": "#cc3311", "spdl": "#009988",
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
    figure, axes = pyplot.subplots(figsize=(10, 1.6 + 0.42 * len(rows)), layout="constrained")
    for place, name in enumerate(names):
        for row, (workload, settings) in enumerate(rows):
            median = results.median(workload, settings, name)
            if median is None:
                continue
            values = results.rounds(workload, settings, name, "items/s")
            axes.errorbar(median, row + 0.6 * (place / max(len(names) - 1, 1) - 0.5), fmt="o", markersize=5,
                          xerr=[[median - min(values)], [max(values) - median]], color=COLOURS[name], elinewidth=1)
    for row in range(len(rows)):
        axes.axhspan(row - 0.4, row + 0.4, color="#f3f3f3", zorder=0)
    axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), [f"{workload}, {settings}" for workload, settings in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("items per second, logarithmic: median of all rounds, with the least and the greatest")
    axes.set_title(f"{title(results)}, {results.data['machine']['cores']} cores")
    axes.grid(axis="x", alpha=0.4)
    figure.legend(handles=[pyplot.Line2D([], [], marker="o", linestyle="", color=COLOURS[name], label=name)
                           for name in names], loc="outside upper right", ncols=len(names), frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
