"""Ways for a process to end, over situations its loader may be in: each once, in a child process. The table of what is
expected is in ``exit_matrix.py``, and ``make exit-matrix`` runs all of it many times."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from conftest import eventually
from exit_matrix import CELLS, SECONDS, TRACEBACKS, Outcome, Runs, faults, is_expected_stderr, run

pytestmark = pytest.mark.slow

# One of four; each row and each column has some.
QUARTER = [cell for number, cell in enumerate(CELLS) if (number // 6 + number % 6) % 4 == 0]

AS_USUAL = ("-X", "faulthandler")
IN_DEVELOPMENT = ("-X", "dev")

every_cell = pytest.mark.parametrize("cell", CELLS, ids=str)
some_cells = pytest.mark.parametrize("cell", QUARTER, ids=str)


@pytest.fixture(scope="module")
def runs(request):
    """The children of all tests that are to run here; they run a few at a time, while the first of these tests wait."""
    runs = Runs()
    for item in request.session.items:
        if item.module is request.module and hasattr(item, "callspec") and "cell" in item.callspec.params:
            options = IN_DEVELOPMENT if item.originalname == test_ending_in_development_mode.__name__ else AS_USUAL
            runs.start(item.callspec.params["cell"], *options)
    yield runs
    runs.close()


@every_cell
def test_ending(runs, cell):
    """The exit status, what is on standard error, and the time it takes are those of the table."""
    assert faults(cell, runs.outcome(cell, *AS_USUAL)) == []


@some_cells
def test_ending_in_development_mode(runs, cell):
    """The same where Python looks closer: memory that was freed, files and warnings that would go unseen."""
    assert faults(cell, runs.outcome(cell, *IN_DEVELOPMENT)) == []


def test_table_is_complete():
    """10 endings over 6 situations, and a quarter of them in development mode, with all endings and situations."""
    assert len({(cell.situation, cell.ending) for cell in CELLS}) == len(CELLS) == 60
    assert len(QUARTER) == 15
    assert {cell.ending for cell in QUARTER} == {cell.ending for cell in CELLS}
    assert {cell.situation for cell in QUARTER} == {cell.situation for cell in CELLS}


@pytest.mark.parametrize("noise", [
    "Exception ignored in: <function f>\n", "Fatal Python error: Aborted\n", "ResourceWarning: unclosed file\n",
    "  indented\n", "\n", "Traceback (most recent call last):\n  File\nKeyboardInterrupt\n"])
@pytest.mark.parametrize("expected", ["-", *TRACEBACKS])
def test_any_noise_is_seen(expected, noise):
    """Whatever stands before or after what is expected on standard error, or in its place, is a fault."""
    quiet = "" if expected == "-" else f"Traceback (most recent call last):\n  File\n    line\n{TRACEBACKS[expected]}"
    assert is_expected_stderr(expected, quiet)
    assert not is_expected_stderr(expected, quiet + noise)
    assert not is_expected_stderr(expected, noise + quiet)


def test_other_status_words_or_time_are_seen():
    """Each is a fault of its own; a machine that was busy when the child started gives it more time."""
    cell = next(cell for cell in CELLS if cell.ending == "next" and cell.limit == "now")
    late = 2 * SECONDS["now"][1]
    assert faults(cell, Outcome(0, ["ready", "complete"], "", 0.1, 1.0)) == []
    assert faults(cell, Outcome(0, ["ready", "complete"], "", late, 3.0)) == []
    assert len(faults(cell, Outcome(0, ["ready", "complete"], "", late, 1.0))) == 1
    assert len(faults(cell, Outcome(0, ["ready"], "", 0.1, 1.0))) == 1
    assert len(faults(cell, Outcome(-11, ["ready", "complete"], "", 0.1, 1.0))) == 1
    assert len(faults(cell, Outcome(-11, [], "noise", late, 1.0))) == 4
    cell = next(cell for cell in CELLS if cell.ending == "end" and cell.limit == "grace")
    assert len(faults(cell, Outcome(0, ["ready"], "", 0.9, 1.0))) == 1
    assert faults(cell, Outcome(0, ["ready"], "", 1.1, 1.0)) == []


def named_workers(process: int) -> int:
    """How many threads of another process are workers of a loader."""
    names = []
    for task in Path(f"/proc/{process}/task").iterdir():
        try:
            names.append((task / "comm").read_text())
        except OSError:  # it ended meanwhile
            pass
    return sum(name.startswith("dlrs-") for name in names)


@pytest.mark.parametrize("situation", ["python", "c"])
@pytest.mark.parametrize(("ending", "sent", "status", "stderr"), [
    ("sigint-beside", signal.SIGINT, -signal.SIGINT, "int"), ("sigterm-exit", signal.SIGTERM, 6, "-")])
def test_second_signal_ends_the_wait_at_exit(situation, ending, sent, status, stderr):
    """The second that the exit gives to workers inside Python is cut short, without a further word, by Ctrl-C and by a
    signal whose handler calls sys.exit()."""

    def interrupt(child) -> None:
        child.send_signal(sent)
        # The exit tells all workers to end, and begins to wait; the one that is in nobody's code ends at once.
        assert eventually(lambda: named_workers(child.pid) == 2)
        child.send_signal(sent)

    outcome = run(situation, ending, during=interrupt)
    assert is_expected_stderr(stderr, outcome.stderr), outcome.stderr
    assert outcome.status == status
    assert outcome.seconds < SECONDS["now"][1] * outcome.busy


@pytest.mark.parametrize("situation", ["none", "python", "nested"])
def test_ctrl_c_twice_at_once_ends_the_process(situation):
    """The second may find CPython anywhere on its way out, which may say so; the end is that of Ctrl-C all the same."""
    outcome = run(situation, "sigint", during=lambda child: child.send_signal(signal.SIGINT))
    assert outcome.status == -signal.SIGINT
    assert "KeyboardInterrupt\n" in outcome.stderr
    assert "Fatal" not in outcome.stderr
    assert not any("ignored" in line and "dataloader" in line.lower() for line in outcome.stderr.splitlines())
    assert outcome.seconds < SECONDS["grace"][1] * outcome.busy


def test_sigterm_ends_a_process_whose_worker_keeps_the_interpreter():
    """A worker in a call of C that never lets go of the GIL: no Python runs any more, and SIGTERM ends it at once."""
    outcome = run("c-with-gil", "sigterm", arguments=["60"])
    assert (outcome.status, outcome.stdout, outcome.stderr) == (-signal.SIGTERM, ["ready"], "")
    assert outcome.seconds < SECONDS["now"][1] * outcome.busy


@pytest.mark.parametrize(("ending", "status"), [("end", 0), ("os._exit", 4)])
def test_worker_that_keeps_the_interpreter_for_a_while_delays_the_end(ending, status):
    """A worker in calls of C that hold the GIL for 0.2 s each: the exit waits for what is under way, and no more."""
    outcome = run("c-with-gil", ending, arguments=["0.2"])
    assert (outcome.status, outcome.stdout, outcome.stderr) == (status, ["ready"], "")
    assert outcome.seconds < SECONDS["grace"][1] * outcome.busy
