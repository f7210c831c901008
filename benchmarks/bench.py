"""Compare loaders: every contender in an environment and a process of its own, taking turns on the same workloads.

    python bench.py [--cases overhead,files] [--contenders ours,plain] [--torch]

writes `<tag>.json`, `<tag>.md` and `<tag>.png`, where the tag is the version of the Python that runs this, as in 3.13t:
a full run to `results/`, where figures are kept, any other to `build/bench/`.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import cases
import chart
from environments import REQUIREMENTS, Absent, interpreter
from process import CHILD, Process
from report import mark_table, run_report
from results import Results

try:
    from tqdm import tqdm
except ImportError:  # it is for people; whoever runs this without them may not have it
    tqdm = None

ROOT = Path(__file__).parents[1]
TAG = "{}.{}{}".format(*sys.version_info[:2], sys.abiflags)
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "dataloader-rs" / "bench"
HAS_GIL = getattr(sys, "_is_gil_enabled", lambda: True)()

# Where torch is a package of moderate size.
TORCH_TAGS = ("3.11",)


def main() -> None:
    arguments = parsed_arguments()
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dataloader-rs-bench-") as scratch:
        data = {
            "tag": TAG,
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "commit": commit(),
            "rounds": arguments.rounds,
            "tiny": arguments.tiny,
            "machine": machine(),
            "python": {"version": platform.python_version(), "gil": HAS_GIL,
                       "build": " ".join([*platform.python_build(), platform.python_compiler()])},
        }
        processes, data["contenders"] = present(arguments, Path(scratch))
        started = time.monotonic()
        try:
            data["results"] = compared(arguments, processes)
        finally:
            for process in processes.values():
                process.end()
        data["seconds"] = round(time.monotonic() - started, 1)
    results = Results(data)
    target = arguments.output / TAG
    results.save(target.with_name(f"{TAG}.json"))
    target.with_name(f"{TAG}.md").write_text(run_report(results), encoding="utf-8")
    try:
        chart.draw(results, target.with_name(f"{TAG}.png"))
    except ModuleNotFoundError as error:
        print(f"no chart: {error}", file=sys.stderr)
    print("\n".join(mark_table(results)))
    print(f"wrote {target}.json and .md in {data['seconds']:.0f} s")


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare loaders on the same workloads.")
    parser.add_argument("--cases", type=words, default=[], help=f"some of {', '.join(cases.GROUPS)}; all by default")
    parser.add_argument("--contenders", type=words, default=[],
                        help=f"some of {', '.join(REQUIREMENTS)}; all by default, bare on free-threaded builds only")
    parser.add_argument("--torch", action="store_true", help="compare torch also where it is a huge package")
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds, after one to warm up")
    parser.add_argument("--limit", type=float, default=60, help="seconds after which a run counts as hung")
    parser.add_argument("--tiny", action="store_true", help="two rounds of a few items each, to see that all works")
    parser.add_argument("--here", action="store_true", help="install nothing: run all in this environment")
    parser.add_argument("--output", type=Path, help="folder for the results")
    arguments = parser.parse_args()
    if arguments.output is None:
        is_full = not (arguments.cases or arguments.contenders or arguments.tiny or arguments.here)
        arguments.output = Path(__file__).parent / "results" if is_full else ROOT / "build" / "bench"
    if arguments.tiny:
        arguments.rounds = 2
    try:
        arguments.cases = cases.chosen(arguments.cases)
    except ValueError as error:
        parser.error(str(error))
    unknown = set(arguments.contenders) - set(REQUIREMENTS)
    if unknown:
        parser.error(f"a contender must be one of {', '.join(REQUIREMENTS)}, got {', '.join(sorted(unknown))}")
    if not arguments.contenders:
        arguments.contenders = [name for name in REQUIREMENTS if name != "bare" or not HAS_GIL]
    return arguments


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def present(arguments: argparse.Namespace, scratch: Path) -> tuple[dict[str, Process], dict[str, dict]]:
    """A process for each contender that can take part, and for the record their versions, or why they cannot."""
    processes, about = {}, {}
    for name in arguments.contenders:
        python = chosen_interpreter(name, arguments)
        if isinstance(python, Absent):
            about[name] = {"absent": python.reason}
            continue
        command = [str(python), str(CHILD), name, str(scratch)]
        if arguments.tiny:
            command.append("--tiny")
        if name in ("ours", "bare"):
            command += ["--path", str(ROOT)]
        process = Process(command, arguments.limit, scratch / f"{name}.log")
        hello = process.hello()
        if "failed" in hello:
            about[name] = {"absent": hello["failed"]}
            process.end()
        else:
            about[name] = hello
            processes[name] = process
    return processes, about


def chosen_interpreter(name: str, arguments: argparse.Namespace) -> Path | Absent:
    if name == "torch" and TAG not in TORCH_TAGS and not arguments.torch:
        return Absent("its package takes gigabytes on this Python; TORCH=1 asks for it")
    if arguments.here:
        return Path(sys.executable)
    print(f"environment of {name}", file=sys.stderr)
    return interpreter(name, CACHE / TAG)


def compared(arguments: argparse.Namespace, processes: dict[str, Process]) -> list[dict]:
    """The result of each contender with each setting of each workload; within a workload they take turns.

    Whoever fails once is out for that workload and setting, and reported as failed. What is measured only once gets a
    new process, so that nothing counts which earlier workloads left behind.
    """
    found = []
    turns = sum(len(workload.settings) * len(processes) * (1 if workload.once else arguments.rounds + 1)
                for workload in arguments.cases)
    bar = None if tqdm is None else tqdm(total=turns, unit="run", smoothing=0.02, mininterval=0.5)
    for workload in arguments.cases:
        rows = [{"workload": workload.name, "settings": settings, "contender": name}
                for settings in workload.settings for name in processes]
        for number in range(1 if workload.once else arguments.rounds + 1):
            is_warm_up = number == 0 and not workload.once
            for row in rows:
                if bar is not None:
                    bar.set_description(f"{workload.name}, {row['contender']}", refresh=False)
                    bar.update()
                if "failed" in row or "not_applicable" in row:
                    continue
                process = processes[row["contender"]]
                if workload.once:
                    process.end()
                answer = process.ask(workload.name, row["settings"])
                if "figures" not in answer:
                    row.pop("figures", None)
                    row.update(answer)
                elif not is_warm_up:
                    figures = row.setdefault("figures", {})
                    for figure, value in answer["figures"].items():
                        figures.setdefault(figure, []).append(value)
        found += rows
    if bar is not None:
        bar.close()
    return found


def commit() -> str:
    """The commit of the checkout, with a mark if files differ from it."""
    described = subprocess.run(["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=ROOT,
                               capture_output=True, text=True)
    return described.stdout.strip() or "unknown"


def machine() -> dict[str, object]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor() or platform.machine()
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "system": platform.platform(),
            "load": [round(load, 2) for load in os.getloadavg()]}


if __name__ == "__main__":
    main()
