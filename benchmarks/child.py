"""One contender's process: answers each line of JSON on standard input with one on standard output.

    python child.py CONTENDER FOLDER [--tiny] [--path CHECKOUT]

It starts with a line about itself. ``{"workload": ..., "settings": ...}`` measures once and is answered with
``{"figures": {...}}``, ``{"not_applicable": reason}`` or ``{"failed": reason}``. Loaders of a workload stay as they
are between its runs, and are closed when another workload's turn comes.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import cases
import measures

# These belong to the workloads, so that their versions matter to everybody's figures.
COMMON_DISTRIBUTIONS = ("numpy", "pillow")


class Subjects:
    """The subjects of the workload at hand, by the name of their settings."""

    def __init__(self, contender, folder: Path, tiny: bool) -> None:
        self.contender = contender
        self.folder = folder
        self.tiny = tiny
        self.workload: cases.Workload | None = None
        self.subjects: dict[str, measures.Subject] = {}

    def answer(self, workload: cases.Workload, name: str) -> dict[str, object]:
        if workload is not self.workload:
            self.close()
            self.workload = workload
        settings = workload.settings[name]
        reason = self.contender.refuses(workload, settings)
        if workload.shares and not hasattr(self.contender, "share"):
            reason = "has no share"
        if reason:
            return {"not_applicable": reason}
        if name not in self.subjects:
            self.subjects[name] = measures.Subject(self.contender, workload, settings, self.folder, self.tiny)
        return {"figures": self.subjects[name].measure()}

    def close(self) -> None:
        for subject in self.subjects.values():
            subject.close()
        self.subjects.clear()
        gc.collect()


def versions(distributions: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for distribution in distributions:
        try:
            found[distribution] = version(distribution)
        except PackageNotFoundError:
            found[distribution] = "not installed"
    return found


def in_a_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure one contender as told on standard input.")
    parser.add_argument("contender")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--path", help="where to import the contender's library from, if it is not installed")
    arguments = parser.parse_args()

    # What a library prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(answer: dict[str, object]) -> None:
        print(json.dumps(answer), file=answers)

    if arguments.path is not None:
        sys.path.insert(0, arguments.path)
    try:
        contender = importlib.import_module(f"contenders.{arguments.contender}")
    except Exception as error:
        say({"failed": in_a_line(error)})
        return
    say({"versions": versions((*contender.DISTRIBUTIONS, *COMMON_DISTRIBUTIONS))})

    subjects = Subjects(contender, arguments.folder, arguments.tiny)
    for line in sys.stdin:
        question = json.loads(line)
        try:
            say(subjects.answer(cases.BY_NAME[question["workload"]], question["settings"]))
        except Exception as error:
            say({"failed": in_a_line(error)})
    subjects.close()


if __name__ == "__main__":
    main()
