"""The benchmark measures what it says: contenders give the same samples, and nothing that goes wrong is left out."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(FOLDER))

import cases  # noqa: E402
import contenders.ours  # noqa: E402
import contenders.plain  # noqa: E402
import count  # noqa: E402
import marks  # noqa: E402
import report  # noqa: E402
from environments import Absent, last_line  # noqa: E402
from measures import Subject  # noqa: E402
from process import Process  # noqa: E402
from results import Results  # noqa: E402
from workloads import stamped  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("workloads")


def batches(contender, workload: cases.Workload, settings, folder: Path) -> list:
    subject = Subject(contender, workload, settings, folder, tiny=True)
    loader = subject.make(workload.tiny)
    loaded = list(loader)
    getattr(loader, "close", lambda: None)()
    return sorted(sum(loaded, [])) if settings.shuffle else loaded


@pytest.mark.parametrize("name", [workload.name for workload in cases.WORKLOADS])
def test_loader_gives_the_samples_of_a_plain_loop(name, folder):
    """What is compared is the same work, with all settings."""
    workload = cases.BY_NAME[name]
    if workload.shares and not hasattr(contenders.ours, "share"):
        pytest.skip("dataloader_rs has no share")
    for settings in workload.settings.values():
        if settings.collate_fn is stamped:
            settings = dataclasses.replace(settings, collate_fn=None)
        alone = dataclasses.replace(settings, num_workers=0, items_in_parallel=1)
        try:
            expected = batches(contenders.plain, dataclasses.replace(workload, shares=False), alone, folder)
        except ModuleNotFoundError as error:
            pytest.skip(str(error))
        loaded = batches(contenders.ours, workload, settings, folder)
        assert len(loaded) == len(expected) > 0
        for ours, plain in zip(loaded, expected, strict=True):
            np.testing.assert_equal(ours, plain)


def test_vocabulary_goes_through_share(folder):
    """Where a loader has a share, the dataset reads what it returned."""
    contender = types.SimpleNamespace(BASE=object, share=lambda obj: {**obj, "shared": 1})
    [workload] = [workload for workload in cases.WORKLOADS if workload.shares]
    subject = Subject(contender, workload, workload.settings[cases.TWO], folder, tiny=True)
    assert subject.dataset(1).vocabulary["shared"] == 1


def test_run_writes_json_and_markdown(tmp_path):
    """A whole run at the tiny size, with a contender that cannot take part."""
    finished = subprocess.run(
        [sys.executable, str(FOLDER / "bench.py"), "--tiny", "--here", "--contenders", "plain,ours,torch",
         "--output", str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stderr
    [path] = tmp_path.glob("*.json")
    results = Results.load(path)
    for workload in cases.WORKLOADS:
        for settings in workload.settings:
            rounds = [results.rounds(workload.name, settings, "ours", figure) for figure in workload.figures]
            row = results.by_key[workload.name, settings, "ours"]
            assert all(len(values) == (1 if workload.once else 2) for values in rounds) or (
                row.get("failed") == "ModuleNotFoundError: Pillow is not installed"
                or row.get("not_applicable") == "has no share"), row
    if importlib.util.find_spec("torch") is None:
        assert results.data["contenders"]["torch"]["absent"]
        assert "- torch: " in path.with_suffix(".md").read_text()
    assert path.with_suffix(".md").read_text().startswith("# CPython ")
    assert path.with_suffix(".png").exists() == (importlib.util.find_spec("matplotlib") is not None)


def results_of(rows: dict, *, version: str = "3.13.0", gil: bool = True,
               absent: dict[str, str] | None = None) -> Results:
    """Results with these rounds by workload, settings and contender; a string is the reason of a failure."""
    names = dict.fromkeys(contender for _, _, contender in rows)
    return Results({
        "tag": version[:4] + ("" if gil else "t"), "date": "2000-01-01", "commit": "abc", "rounds": 3, "seconds": 1.0,
        "machine": {"cpu": "a cpu", "cores": 2, "system": "Linux"},
        "python": {"version": version, "gil": gil, "build": "main"},
        "contenders": {**{name: {"versions": {name: "1.0"}} for name in names},
                       **{name: {"absent": reason} for name, reason in (absent or {}).items()}},
        "results": [{"workload": workload, "settings": settings, "contender": contender,
                     **({"failed": figures} if isinstance(figures, str) else {"figures": figures})}
                    for (workload, settings, contender), figures in rows.items()],
    })


def per_second(*rounds: float) -> dict[str, list[float]]:
    return {"items/s": list(rounds)}


def test_ratio_compares_neighbours():
    """A machine that is slow in one round is so for both."""
    results = results_of({("files", cases.NONE, "ours"): per_second(10, 1, 10),
                          ("files", cases.TWO, "ours"): per_second(20, 2, 21)})
    assert results.ratio("files", (cases.TWO, "ours"), (cases.NONE, "ours")) == 2.0


def mark_of(results: Results, what: str) -> marks.Mark:
    [mark] = [mark for mark in marks.marks(results) if mark.what == what]
    return mark


def test_marks_are_met_missed_or_not_measured():
    """A mark without a figure says why, and one whose workload was not run is left out."""
    results = results_of({
        ("return i, batch 32", cases.NONE, "ours"): per_second(100),
        ("return i, batch 32", cases.TWO, "ours"): per_second(50),
        ("return i, batch 32", cases.TWO_DEEP, "ours"): per_second(60),
        ("return i, batch 32", cases.TWO, "torch"): "OSError: broken",
        ("first batch, cold", cases.TWO, "ours"): {"ms": [0.3, 0.5, 0.35]},
    }, absent={"rust": "no wheel"})
    assert mark_of(results, "return i, batch 32, 2 workers against none").met is True
    assert mark_of(results, "return i, batch 32, 2 workers, prefetch_depth=64 against none").met is False
    assert mark_of(results, "first batch, cold, 2 workers").met is True
    rust = mark_of(results, "return i, batch 32, no workers, against the Rust wheel")
    assert (rust.met, rust.reason) == (None, "rust is absent")
    torch = mark_of(results, "return i, batch 32, 2 workers, against torch")
    assert (torch.met, torch.reason) == (None, "torch failed: OSError: broken")
    assert not any("files" in mark.what for mark in marks.marks(results))


@pytest.mark.parametrize("version, expected", [("3.13.5", 0.9 * 1.2), ("3.14.0", 1.95)])
def test_limit_of_bare_threads_lowers_marks_without_deferred_counts(version, expected):
    """On 3.13t no loader can be faster than threads that share only the dataset; 3.14t has no such excuse."""
    rows = {("files", settings, contender): per_second(figure) for settings, contender, figure in (
        (cases.NONE, "ours", 100), (cases.TWO, "ours", 110), (cases.NONE, "bare", 100), (cases.TWO, "bare", 120))}
    mark = mark_of(results_of(rows, version=version, gil=False), "files, 2 workers against none")
    assert mark.mark == pytest.approx(expected)
    assert mark.met is (version == "3.13.5")


@pytest.mark.parametrize("batch_microseconds, is_judged", [(90, False), (110, True)])
def test_gil_batches_below_100_us_may_be_slower_with_workers(batch_microseconds, is_judged):
    """The rule that workers never cost anything is for batches that are worth handing over."""
    rows = {("fresh objects", settings, "ours"): per_second(32 / (batch_microseconds * 1e-6))
            for settings in (cases.NONE, cases.TWO)}
    whats = [mark.what for mark in marks.marks(results_of(rows))]
    assert ("fresh objects, 2 workers never slower than none" in whats) is is_judged


def test_report_shows_what_is_missing_and_who_wins():
    """Absent and failed contenders are listed with their reasons, and every defeat is."""
    results = results_of({
        ("files", cases.NONE, "ours"): per_second(1000, 1100, 1200),
        ("files", cases.TWO, "ours"): per_second(1500),
        ("files", cases.TWO, "torch"): per_second(1600),
        ("files", cases.NONE, "torch"): "the process was ended by SIGKILL",
        ("memory after 5,000 batches", cases.TWO, "ours"): {"MB": [50.0], "MB grown": [0.2]},
        ("memory after 5,000 batches", cases.TWO, "torch"): {"MB": [600.0], "MB grown": [0.1]},
    }, absent={"rust": "ERROR: No matching distribution found"})
    text = report.run_report(results)
    assert "1.10 k (1.00 k–1.20 k)" in text
    assert "- rust: ERROR: No matching distribution found" in text
    assert "- torch, files, no workers: the process was ended by SIGKILL" in text
    assert report.defeats(results) == ["- files, 2 workers: torch 1.60 k items/s, ours 1.50 k"]
    assert text.splitlines()[0][2:] in report.bench_report([results])


@pytest.mark.parametrize("value, text", [(0.0412, "0.041"), (1.1, "1.10"), (12.34, "12.3"), (999.6, "1.00 k"),
                                         (123_456, "123 k"), (15_100_000, "15.1 M"), (-0.5, "-0.50"), (0.0, "0.000")])
def test_numbers_have_about_three_digits(value, text):
    """Figures of all sizes can be read in one column."""
    assert report.number(value) == text


FAKE_CHILD = """
import json, os, sys, time
print(json.dumps({"versions": {}}), flush=True)
for line in sys.stdin:
    what = json.loads(line)["workload"]
    if what == "die":
        print("out of luck", file=sys.stderr, flush=True)
        os._exit(3)
    if what == "hang":
        time.sleep(60)
    print(json.dumps({"figures": {}}), flush=True)
"""


def test_child_that_dies_or_hangs_is_reported_and_replaced(tmp_path):
    """What happens to one run is its result, and the next run has a process again."""
    process = Process([sys.executable, "-c", FAKE_CHILD], 0.2, tmp_path / "log")
    assert process.hello() == {"versions": {}}
    assert process.ask("hang", "") == {"failed": "took more than 0 s"}
    process.limit = 30
    assert process.ask("die", "") == {"failed": "the process ended with status 3: out of luck"}
    assert process.ask("work", "") == {"figures": {}}
    process.end()


def test_absence_has_the_words_of_pip():
    """Of all that pip prints, the reason is the last error."""
    said = "WARNING: a\nERROR: Could not find a version\nERROR: No matching distribution found for x\n\nWARNING: b\n"
    assert Absent(last_line(said)).reason == "ERROR: No matching distribution found for x"


@pytest.mark.parametrize("counted, baseline, too_high", [
    (104, 100.0, False), (106, 100.0, True), (50, 100.0, False), (200, None, False)])
def test_count_is_too_high_beyond_its_tolerance(counted, baseline, too_high):
    """Five percent. Without a baseline it is shown only."""
    assert count.judged(counted, baseline)[1] is too_high


def test_baselines_have_every_count():
    """A count that has no figure to be compared with guards nothing."""
    for counts in json.loads(count.BASELINE.read_text()).values():
        assert list(counts) == [name for name, *_ in count.COUNTS]
