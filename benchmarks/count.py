"""Instructions for each item, counted by callgrind: a guard of the hot path that no noise touches.

    python count.py [--update]

What a process of few items takes is subtracted from what one of many takes, so that its start cancels. The figures
are compared with `counts.json`, which `--update` rewrites for the Python that runs this. There are no workers: how
often those wait for each other depends on the clock, and under valgrind, where all takes fifty times as long,
unchanged code differed by half.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

FOLDER = Path(__file__).parent
BASELINE = FOLDER / "counts.json"
# Instructions depend on how the interpreter was compiled, too.
OPTIMISED = "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or "")
KEY = (f"{platform.python_version()}{sys.abiflags}, {platform.machine()}, {platform.python_compiler()}, "
       f"{'optimised' if OPTIMISED else 'not optimised'}")
TOLERANCE = 1.05

# Name and batch size; and few and many items, whose difference is counted.
COUNTS = (
    ("no workers, batch 1", 1, 1_000, 6_000),
    ("no workers, batch 32", 32, 3_200, 64_000),
    ("no workers, batch 256", 256, 25_600, 128_000),
)


class CountError(Exception):
    """Callgrind gave no figure."""


def instructions(num_items: int, batch_size: int) -> int:
    """All that a process executes in which one epoch of `num_items` is loaded."""
    command = [
        "valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", sys.executable, "-S",
        str(FOLDER / "count_child.py"), str(FOLDER.parent), str(num_items), str(batch_size),
    ]
    # Sets and dicts are laid out the same way each time.
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment)
    collected = re.search(r"Collected : (\d+)", finished.stderr)
    if finished.returncode != 0 or collected is None:
        raise CountError(f"{' '.join(command)}\nended with status {finished.returncode}:\n{finished.stderr[-2000:]}")
    return int(collected[1])


def per_item(batch_size: int, few: int, many: int) -> float:
    more = instructions(many, batch_size) - instructions(few, batch_size)
    return round(more / (many - few), 1)


def judged(count: float, baseline: float | None) -> tuple[str, bool]:
    """A word on the count, and whether it is too high."""
    if baseline is None:
        return "no baseline for this Python: --update makes one", False
    too_high = count > baseline * TOLERANCE
    return f"{(count / baseline - 1) * 100:+.1f} % against {baseline}" + (": TOO HIGH" if too_high else ""), too_high


def main() -> None:
    parser = argparse.ArgumentParser(description="Count instructions for each item under callgrind.")
    parser.add_argument("--update", action="store_true", help="make the figures the baseline of this Python")
    arguments = parser.parse_args()
    if shutil.which("valgrind") is None:
        sys.exit("make bench-count needs valgrind, which is not on PATH: install it with the system's package manager")

    baselines = json.loads(BASELINE.read_text(encoding="utf-8")) if BASELINE.exists() else {}
    before = baselines.get(KEY, {})
    counts = {}
    failed = False
    print(f"CPython {KEY}, instructions for each item of `return i`")
    for name, batch_size, few, many in COUNTS:
        try:
            counts[name] = per_item(batch_size, few, many)
        except CountError as error:
            sys.exit(f"{name}: {error}")
        verdict, too_high = judged(counts[name], before.get(name))
        failed = failed or too_high
        print(f"{name:<24} {counts[name]:8.1f}   {verdict}", flush=True)
    if arguments.update:
        baselines[KEY] = counts
        BASELINE.write_text(json.dumps(dict(sorted(baselines.items())), indent=1) + "\n", encoding="utf-8")
    elif failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
