"""A virtual environment for each contender: two of them have the same import name, and versions must not mix."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# What the workloads need.
COMMON = ("numpy", "pillow")

REQUIREMENTS = {
    "plain": (),
    "torch": ("torch==2.13.0",),
    "rust": ("dataloader-rs==0.2.0",),
    "spdl": ("spdl-core",),
    "ours": (),
    "bare": (),
}
# The other loader of our name builds from source where it has no wheel, which takes a Rust toolchain.
WHEEL_ONLY = "dataloader-rs"


@dataclass(frozen=True)
class Absent:
    """A contender that cannot take part, and why."""

    reason: str


def interpreter(contender: str, cache: Path) -> Path | Absent:
    """The Python of the contender's environment, which is made, or made anew, if it has to be.

    Parameters
    ----------
    contender : str
        A key of `REQUIREMENTS`.
    cache : pathlib.Path
        Folder that belongs to this interpreter. Environments in it are kept for the next run.

    Returns
    -------
    pathlib.Path or Absent
        With the last line of what pip said, if pip refused.
    """
    folder = cache / contender
    python = folder / "bin" / "python"
    requirements = [*REQUIREMENTS[contender], *COMMON]
    made_for = "\n".join([sys.version, sys.base_prefix, *requirements])
    stamp = folder / "made-for.txt"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == made_for:
        return python
    # The driver's pip serves all environments, and compiles nothing in advance, of which little is imported.
    steps = (
        [sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)],
        [sys.executable, "-m", "pip", "--python", str(python), "install", "-qq", "--no-compile", "--prefer-binary",
         "--only-binary", WHEEL_ONLY, *requirements],
    )
    for step in steps:
        finished = subprocess.run(step, capture_output=True, text=True, env=clean_environment())
        if finished.returncode != 0:
            return Absent(last_line(finished.stderr or finished.stdout))
    stamp.write_text(made_for, encoding="utf-8")
    return python


def clean_environment() -> dict[str, str]:
    """Without what lets a contender import what is not its own, or hides the reason of a crash below a stack."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RUST_BACKTRACE")}


def last_line(text: str) -> str:
    """Of all lines the last that is an error; otherwise the last that is no mere note."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("note:")]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no message"])[-1]
