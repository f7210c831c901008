"""Ways to end a process, over situations its loader may be in: what is expected of each pair, and how one is judged.

``python exit_matrix.py`` runs all of them many times and prints how they came out; ``test_exit_matrix.py`` runs each
once. What happens inside is in ``exit_child.py``.

Situations:

    none      num_workers=0, in mid-epoch; whoever consumes is in a loop in Python, inside ``__getitem__``
    idle      the workers have fetched as far ahead as they may, and wait
    python    both workers are in a loop in Python, inside ``__getitem__``
    c         both workers are in a call of C that has released the GIL and does not return
    collate   both workers are inside `collate_fn`, and leave and enter the interpreter all the time
    nested    both workers wait for a loader inside ``__getitem__``, whose own worker is held

Endings. A consumer is inside next(), or where that would not wait (idle) between two batches:

    end           the main thread comes to the end of the script, in mid-epoch, between two batches
    sys.exit      the same with ``sys.exit(3)``
    error         the same with an error that nobody catches
    os._exit      the same with ``os._exit(4)``
    sigint        Ctrl-C while the main thread consumes
    sigterm       SIGTERM while the main thread consumes
    fork-exit     a forked child exits, then the parent comes to the end
    fork-iterate  a forked child iterates the loader and exits; the parent gets the batches that were left, and ends
    daemon        the main thread comes to the end while a daemon thread consumes
    next          the main thread comes to the end while another thread consumes, which gets the batches that were left
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

# What each cell is expected to come to: exit status, what is on standard error (TRACEBACKS), and how long it takes
# (SECONDS). A process that a signal ended has the status that the shell shows as 128 + number, here -number.
#
# - Workers inside the user's code are given a second at the exit, and no longer. os._exit and SIGTERM wait for nobody,
#   and neither does the exit for held threads that are not workers (none).
# - sigint, none: it is raised inside ``__getitem__``, so it comes with the note of all errors of a dataset.
# - fork-iterate and next let the workers go: what they meet at the exit has long ended.
TABLE = """
              none           idle           python         c              collate        nested
end             0 -     now    0 -     now    0 -     grace  0 -     grace  0 -     grace  0 -     grace
sys.exit        3 -     now    3 -     now    3 -     grace  3 -     grace  3 -     grace  3 -     grace
error           1 error now    1 error now    1 error grace  1 error grace  1 error grace  1 error grace
os._exit        4 -     now    4 -     now    4 -     now    4 -     now    4 -     now    4 -     now
sigint         -2 note  now   -2 int   now   -2 int   grace -2 int   grace -2 int   grace -2 int   grace
sigterm       -15 -     now  -15 -     now  -15 -     now  -15 -     now  -15 -     now  -15 -     now
fork-exit       0 -     child  0 -     child  0 -     both   0 -     both   0 -     both   0 -     both
fork-iterate    0 -     child  0 -     child  0 -     child  0 -     child  0 -     child  0 -     child
daemon          0 -     now    0 -     now    0 -     grace  0 -     grace  0 -     grace  0 -     grace
next            0 -     now    0 -     now    0 -     now    0 -     now    0 -     now    0 -     now
"""

# The one traceback there may be ends so; "-": nothing at all.
TRACEBACKS = {
    "error": "ValueError: mine\n",
    "int": "KeyboardInterrupt\n",
    "note": "KeyboardInterrupt\n"
            "dataloader_rs: raised for index 2 (position 0 of batch 1), in the calling thread\n",
}

# At least and at most, from when the ending begins, on a machine that has nothing else to do; a busy one is given more,
# see `Outcome.busy`. "grace": the exit gives a second to workers inside Python; "child": a forked child ends before.
SECONDS = {"now": (0.0, 0.9), "grace": (1.0, 2.5), "child": (0.0, 2.0), "both": (1.0, 3.5)}

# These tell by it that the batches they went on with were right.
COMPLETE = ("fork-iterate", "next")

SIGNALS = {"sigint": signal.SIGINT, "sigterm": signal.SIGTERM}

# Whatever hangs is ended after so long.
HANGS = 50.0  # seconds

CHILD = Path(__file__).with_name("exit_child.py")


@dataclasses.dataclass(frozen=True)
class Cell:
    """A pair of situation and ending, and what is expected of it."""

    situation: str
    ending: str
    status: int
    stderr: str
    limit: str

    def __str__(self) -> str:
        return f"{self.situation}, {self.ending}"


def read_table(table: str) -> list[Cell]:
    header, *rows = table.strip("\n").splitlines()
    cells = []
    for row in rows:
        ending, *words = row.split()
        for number, situation in enumerate(header.split()):
            status, stderr, limit = words[3 * number:3 * number + 3]
            cells.append(Cell(situation, ending, int(status), stderr, limit))
    return cells


CELLS = read_table(TABLE)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a child came to."""

    status: int
    stdout: list[str]
    stderr: str
    seconds: float  # from when its ending began
    busy: float  # how many times longer than on a machine with nothing else to do such a thing takes, at least 1


def environment() -> dict[str, str]:
    """What a child runs with. This checkout comes last: a build with a sanitizer is elsewhere."""
    paths = [os.environ.get("PYTHONPATH", ""), str(CHILD.parents[1]), str(CHILD.parent)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run(situation: str, ending: str, options: Iterable[str] = ("-X", "faulthandler"), during=lambda child: None,
        arguments: Iterable[str] = (), env: dict[str, str] | None = None) -> Outcome:
    """Run a child until it has ended.

    Parameters
    ----------
    situation, ending : str
    options : iterable of str
        For the interpreter. Warnings are errors in any case.
    during : callable
        ``during(child)`` is called when it is about to end.
    arguments : iterable of str
        Further ones for the child.
    env : dict, optional
        The `environment`, where it was taken before.
    """
    born = time.monotonic()
    child = subprocess.Popen([sys.executable, "-W", "error", *options, str(CHILD), situation, ending, *arguments],
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
                             env=environment() if env is None else env)
    watch = threading.Timer(HANGS, end_hanging, [child])
    watch.start()
    with child:
        # Where it cannot come so far it ends by itself, with an error. Both pipes hold more than it ever says.
        started = child.stdout.readline()
        startup = time.monotonic() - born
        ready, _, began = child.stdout.readline().partition(" ")
        if ready == "ready":
            during(child)
            if ending in SIGNALS:
                child.send_signal(SIGNALS[ending])
        child.wait()
        # The clock is the same in all processes.
        seconds = time.monotonic() - float(began or born)
        # Not communicate(), which knows nothing of what readline() has read ahead.
        stdout, stderr = child.stdout.read(), child.stderr.read()
    watch.cancel()
    # How much longer it took to start than it kept a processor busy.
    busy = max(1.0, startup / float(started.split()[1])) if started.startswith("started ") else 1.0
    return Outcome(child.returncode, [ready, *stdout.splitlines()], stderr, seconds, busy)


def end_hanging(child: subprocess.Popen) -> None:
    child.send_signal(signal.SIGABRT)  # faulthandler shows where
    time.sleep(1)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # and those it forked


def faults(cell: Cell, outcome: Outcome) -> list[str]:
    """In which ways an outcome is not what is expected of the cell, in words."""
    found = []
    if outcome.status != cell.status:
        found.append(f"status {outcome.status}, not {cell.status}")
    if not is_expected_stderr(cell.stderr, outcome.stderr):
        found.append(f"on stderr:\n{outcome.stderr}")
    if outcome.stdout != ["ready"] + ["complete"] * (cell.ending in COMPLETE):
        found.append(f"it said {outcome.stdout}")
    least, most = SECONDS[cell.limit]
    if not least <= outcome.seconds <= most * outcome.busy:
        found.append(f"{outcome.seconds:.2f} s, not {least} to {most} times {outcome.busy:.1f}")
    return found


def is_expected_stderr(expected: str, stderr: str) -> bool:
    """Is it nothing, or exactly one traceback with the expected end?"""
    if expected == "-":
        return stderr == ""
    return bool(re.fullmatch(r"Traceback \(most recent call last\):\n(?:  .*\n)+" + re.escape(TRACEBACKS[expected]),
                             stderr))


class Runs:
    """Children of several cells, two at a time: some wait, and some keep two processors busy."""

    def __init__(self, at_once: int = 2) -> None:
        self._threads = ThreadPoolExecutor(at_once)
        self._outcomes: dict[tuple[Cell, tuple[str, ...]], Future[Outcome]] = {}

    def start(self, cell: Cell, *options: str) -> None:
        # Taken here: pytest changes os.environ for each test, which a copy on another thread may run into.
        self._outcomes[cell, options] = self._threads.submit(run, cell.situation, cell.ending, options,
                                                             env=environment())

    def outcome(self, cell: Cell, *options: str) -> Outcome:
        return self._outcomes[cell, options].result()

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=3, help="children that run at a time")
    parser.add_argument("--cells", default="", help="only those whose name contains this, as in 'python, sigint'")
    parser.add_argument("options", nargs="*", default=["-X", "faulthandler"],
                        help="for the interpreter, after --: as in '-- -X dev'")
    arguments = parser.parse_args()
    cells = [cell for cell in CELLS if arguments.cells in str(cell)]
    print(f"{sys.version}\n{len(cells)} cells, {arguments.repeat} times each, {' '.join(arguments.options)}\n")
    with ThreadPoolExecutor(arguments.at_once) as threads:
        outcomes = {cell: [threads.submit(run, cell.situation, cell.ending, arguments.options)
                           for _ in range(arguments.repeat)] for cell in cells}
        missed = [report(cell, [outcome.result() for outcome in outcomes[cell]]) for cell in cells]
    print(f"\n{len(cells) * arguments.repeat - sum(missed)} of {len(cells) * arguments.repeat} as expected")
    return 1 if any(missed) else 0


def report(cell: Cell, outcomes: list[Outcome]) -> int:
    """Print the line of a cell, and whatever was not expected. How many were not?"""
    seconds = [outcome.seconds for outcome in outcomes]
    missed = [found for outcome in outcomes if (found := faults(cell, outcome))]
    print(f"{cell.situation:8} {cell.ending:13} {len(outcomes) - len(missed):3} of {len(outcomes):3} "
          f"  median {statistics.median(seconds):5.2f} s   max {max(seconds):5.2f} s", flush=True)
    for found in missed:
        print("    " + "; ".join(found).replace("\n", "\n    "), flush=True)
    return len(missed)


if __name__ == "__main__":
    sys.exit(main())
