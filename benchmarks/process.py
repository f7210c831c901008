"""The driver's end of a contender's process: questions, answers, and what becomes of one that dies or hangs."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from pathlib import Path

from environments import clean_environment, last_line

CHILD = Path(__file__).with_name("child.py")
START_SECONDS = 120


class Process:
    """A contender that stays alive between its runs, and is started again after it has died.

    Parameters
    ----------
    command : list of str
        What runs `child.py` with this contender.
    limit : float
        Seconds after which a run counts as hung, and the process is killed.
    log : pathlib.Path
        Where its standard error goes.
    """

    def __init__(self, command: list[str], limit: float, log: Path) -> None:
        self.command = command
        self.limit = limit
        self.log = log
        self.process: subprocess.Popen | None = None

    def hello(self) -> dict:
        """Start it if it does not run; what it says about itself, or ``failed``."""
        with self.log.open("w") as log:
            # A session of its own: with it end the worker processes it may have.
            self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                                            text=True, start_new_session=True, env=clean_environment())
        return self.answer(START_SECONDS)

    def ask(self, workload: str, settings: str) -> dict:
        """Measure once. The answer always has one of ``figures``, ``not_applicable`` and ``failed``."""
        if self.process is None:
            hello = self.hello()
            if "failed" in hello:
                return hello
        try:
            print(json.dumps({"workload": workload, "settings": settings}), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            return self.dead()
        return self.answer(self.limit)

    def answer(self, limit: float) -> dict:
        # One line answers one question, so nothing can be left in a buffer that select does not see.
        readable, _, _ = select.select([self.process.stdout], [], [], limit)
        if not readable:
            self.kill()
            return {"failed": f"took more than {limit:.0f} s"}
        line = self.process.stdout.readline()
        return json.loads(line) if line else self.dead()

    def dead(self) -> dict:
        process = self.process
        try:
            status = process.wait(5)
        except subprocess.TimeoutExpired:
            status = None
        self.kill()
        how = ("closed its output" if status is None else
               f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}")
        said = last_line(self.log.read_text(errors="replace"))
        return {"failed": f"the process {how}" + ("" if said == "no message" else f": {said[:200]}")}

    def end(self) -> None:
        """Let it finish by itself, for a moment."""
        if self.process is None:
            return
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.kill()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self.process = None
