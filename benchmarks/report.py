"""Markdown: the tables of a run, and BENCH.md from all runs there are.

    python report.py

renders BENCH.md from `method.md` and the results that are kept in `results/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import cases
from marks import Mark, marks
from results import Results

FOLDER = Path(__file__).parent
# What other loaders do is compared; `plain` and `bare` are limits of two kinds.
LOADERS = ("torch", "rust", "spdl")
SIZES = ((1e6, " M"), (1e3, " k"))
# Differences below these say nothing about a loader.
NEGLIGIBLE = {"MB": 1.0, "MB grown": 1.0, "ns/index": 1.0}


def run_report(results: Results) -> str:
    """One run: what it ran on, its figures, its marks, and what is missing."""
    lines = [f"# {title(results)}", "", *about(results), "", *figures(results), "", "## Marks", "",
             *mark_table(results), *missing(results), "", "## Where another loader wins", "", *defeats(results)]
    return "\n".join(lines) + "\n"


def bench_report(runs: list[Results]) -> str:
    """The method, by hand, and all runs below it."""
    lines = [(FOLDER / "method.md").read_text(encoding="utf-8").rstrip(), "", "## Where another loader wins", ""]
    for results in runs:
        lines += [f"On {title(results)}:", "", *defeats(results), ""]
    for results in runs:
        lines += [f"## {title(results)}", "", *about(results), "", *chart_of(results), *figures(results), "",
                  f"### Marks on {results.data['tag']}", "", *mark_table(results), *missing(results), ""]
    return "\n".join(lines).rstrip() + "\n"


def title(results: Results) -> str:
    python = results.data["python"]
    return f"CPython {python['version']}" + ("" if python["gil"] else ", free-threaded")


def about(results: Results) -> list[str]:
    data = results.data
    machine = data["machine"]
    versions = {}
    for name in results.present:
        versions.update(data["contenders"][name]["versions"])
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return [f"{machine['cores']} cores of {machine['cpu']}, {machine['system']}. {data['python']['build']}. "
            f"{data['date']}, commit {data['commit']}, {data['rounds']} rounds in {data['seconds']:.0f} s. "
            f"With {named}."]


def figures(results: Results) -> Iterator[str]:
    """A table of medians, each with the least and the greatest of its rounds."""
    names = results.present
    yield "| workload | settings | figure | " + " | ".join(names) + " |"
    yield "|---|---|---|" + "---:|" * len(names)
    for workload in cases.WORKLOADS:
        if not results.was_run(workload.name):
            continue
        for settings in workload.settings:
            for figure in workload.figures:
                cells = [cell(results, workload.name, settings, name, figure) for name in names]
                if any(cells):
                    yield f"| {workload.name} | {settings} | {figure} | " + " | ".join(cells) + " |"


def cell(results: Results, workload: str, settings: str, contender: str, figure: str) -> str:
    values = results.rounds(workload, settings, contender, figure)
    if not values:
        row = results.by_key.get((workload, settings, contender), {})
        return "failed" if "failed" in row else ""
    median = number(results.median(workload, settings, contender, figure))
    return f"{median} ({number(min(values))}–{number(max(values))})" if len(values) > 1 else median


def number(value: float) -> str:
    """About three digits, with k or M for the others."""
    size, suffix = next(((size, suffix) for size, suffix in SIZES if abs(value) >= size * 0.9995), (1, ""))
    scaled = abs(value) / size
    digits = 0 if scaled >= 99.95 else 1 if scaled >= 9.995 else 2 if scaled >= 0.0995 else 3
    return f"{value / size:.{digits}f}{suffix}"


def mark_table(results: Results) -> Iterator[str]:
    yield "| what | reached | mark | |"
    yield "|---|---:|---:|---|"
    for mark in marks(results):
        yield f"| {mark.what} | {reached(mark)} | {bound(mark)} | {verdict(mark)} |"


def reached(mark: Mark) -> str:
    return "" if mark.reached is None else f"{number(mark.reached)}{spaced(mark.unit)}"


def bound(mark: Mark) -> str:
    return f"{'≥' if mark.more_is_better else '≤'} {mark.mark:.3g}{spaced(mark.unit)}"


def verdict(mark: Mark) -> str:
    if mark.met is None:
        return f"not measured: {mark.reason}"
    return ("met" if mark.met else "**missed**") + (f" ({mark.note})" if mark.note else "")


def spaced(unit: str) -> str:
    return unit if unit == "x" else f" {unit}"


def missing(results: Results) -> Iterator[str]:
    """Contenders that are absent, and runs that failed or that a loader has nothing for, each with its reason."""
    absent = [f"- {name}: {about['absent']}" for name, about in results.data["contenders"].items() if "absent" in about]
    if absent:
        yield from ("", "Absent:", "", *absent)
    failed = [f"- {row['contender']}, {row['workload']}, {row['settings']}: {row['failed']}"
              for row in results.data["results"] if "failed" in row]
    if failed:
        yield from ("", "Failed:", "", *failed)
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in results.data["results"]:
        if "not_applicable" in row:
            reasons.setdefault((row["contender"], row["not_applicable"]), []).append(row["workload"])
    if reasons:
        yield from ("", "Cells are empty where a contender cannot do what the row asks for:", "")
        for (contender, reason), names in reasons.items():
            several = f"{len(set(names))} workloads" if len(set(names)) > 3 else "; ".join(dict.fromkeys(names))
            yield f"- {contender} {reason} ({several})"


def defeats(results: Results) -> list[str]:
    """Every figure of a row in which another loader, or no loader at all, is better than ours."""
    found = []
    for workload in cases.WORKLOADS:
        for settings in workload.settings:
            for figure in workload.figures:
                ours = results.median(workload.name, settings, "ours", figure)
                if ours is None:
                    continue
                for name in (*LOADERS, "plain"):
                    theirs = results.median(workload.name, settings, name, figure)
                    if theirs is None:
                        continue
                    ahead = theirs - ours if figure in cases.THROUGHPUT else ours - theirs
                    if ahead > NEGLIGIBLE.get(figure, 0) and number(theirs) != number(ours):
                        found.append(f"- {workload.name}, {settings}: {name} {number(theirs)} {figure}, "
                                     f"ours {number(ours)}")
    return found or ["In none of the rows."]


def chart_of(results: Results) -> list[str]:
    chart = FOLDER / "results" / f"{results.data['tag']}.png"
    return [f"![Items per second of all contenders](benchmarks/results/{chart.name})", ""] if chart.exists() else []


def write_bench_report() -> Path:
    """Render BENCH.md from the results that are kept."""
    runs = [Results.load(path) for path in sorted((FOLDER / "results").glob("*.json"))]
    target = FOLDER.parent / "BENCH.md"
    target.write_text(bench_report(runs), encoding="utf-8")
    return target


if __name__ == "__main__":
    print(f"wrote {write_bench_report()}")
