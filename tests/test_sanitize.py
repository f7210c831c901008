"""What `make tsan` and `make asan` make of the reports of a sanitizer."""

import re
from types import SimpleNamespace

import pytest
from sanitize import (
    EXPLAINED,
    ROOT,
    THREADED,
    environment,
    explanations,
    judge,
    pytest_collection_modifyitems,
    reports_in,
    summary,
)

pytestmark = pytest.mark.slow

BAR = "=" * 18

OURS = f"""{BAR}
WARNING: ThreadSanitizer: data race (pid=7)
  Write of size 8 at 0x7b0400000010 by thread T2:
    #0 dlrs_worker_next dataloader_rs/_worker.c:380 (_core.cpython-313t-x86_64-linux-gnu.so+0x123)
    #1 thread_run Python/thread_pthread.h:243 (python3.13+0x99)

  Previous read of size 8 at 0x7b0400000010 by main thread:
    #0 _PyEval_EvalFrameDefault Python/ceval.c:10 (python3.13+0x77)

SUMMARY: ThreadSanitizer: data race dataloader_rs/_worker.c:380 in dlrs_worker_next
{BAR}
"""
THEIRS = OURS.replace("dlrs_worker_next dataloader_rs/_worker.c:380 (_core.cpython-313t-x86_64-linux-gnu.so+0x123)",
                      "list_append Objects/listobject.c:5 (python3.13+0x12)")
ADDRESS = f"""{BAR * 3}
==12==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x60 at pc 0x7f bp 0x7f sp 0x7f
WRITE of size 2 at 0x60 thread T0
    #0 0x7f0ab2fa12d7 in shuffle dataloader_rs/_order.c:80
    #1 0x7f0ab2fa10f6 in dlrs_order_init dataloader_rs/_order.c:180
"""
UNDEFINED = """dataloader_rs/_order.c:31:7: runtime error: shift exponent 64 is too large for 64-bit type 'long'
    #0 0x7f0ab2fa12d7 in shuffle dataloader_rs/_order.c:31
"""


def test_each_report_is_read():
    """However many there are in one file; their titles say what and where."""
    assert [report.title for report in reports_in(OURS + THEIRS)] == [
        "data race / dlrs_worker_next / _PyEval_EvalFrameDefault", "data race / list_append / _PyEval_EvalFrameDefault"]
    assert [report.title for report in reports_in(ADDRESS)] == ["heap-buffer-overflow / shuffle"]
    assert [report.title for report in reports_in(UNDEFINED * 2)] == [
        "undefined behaviour: shift exponent 64 is too large for 64-bit type 'long' / shuffle"] * 2
    assert summary(reports_in(OURS * 2)).startswith("     2  data race / dlrs_worker_next")


def test_race_with_a_frame_of_ours_is_a_fault():
    """One in the interpreter alone is not; what cannot be read is."""
    reports = reports_in(OURS + THEIRS) + reports_in("Segmentation fault, or what it may be\n")
    assert judge("thread", reports, []) == [reports[0], reports[2]]
    assert reports_in(" \n") == []


def test_all_that_the_other_sanitizers_find_is_a_fault():
    """Also outside of our frames: memory that we damaged is mostly met elsewhere."""
    reports = reports_in(ADDRESS.replace("dataloader_rs", "Objects")) + reports_in(UNDEFINED)
    assert judge("address", reports, []) == reports


def test_explained_race_is_no_fault_and_explanations_need_a_reason():
    """An entry is for a kind and a frame; the comment before it is the reason."""
    known = explanations("# A head line.\n\n# It is only\n# counted.\ndata race:dlrs_worker_next .*_worker\\.c\n")
    assert known == {"data race:dlrs_worker_next .*_worker\\.c": "It is only counted."}
    assert judge("thread", reports_in(OURS), known) == []
    assert judge("thread", reports_in(OURS), ["data race:dlrs_other", "deadlock:dlrs_worker_next"]) != []
    with pytest.raises(ValueError, match="no reason is given for data race:x"):
        explanations("# A head line.\n\ndata race:x\n")
    explanations(EXPLAINED.read_text())


def test_one_case_of_each_test_is_kept():
    """That with most workers, and of these with most items in parallel; others as they come first."""
    def item(name: str, **params):
        case = SimpleNamespace(nodeid=f"{name}[{len(items)}]" if params else name)
        if params:
            case.callspec = SimpleNamespace(params=params)
        items.append(case)
        return case

    items: list = []
    plain = item("plain")
    item("sized", num_workers=0, items_in_parallel=1)
    sized = item("sized", num_workers=4, items_in_parallel=3)
    item("sized", num_workers=4, items_in_parallel=1)
    other = item("other", kind="a", num_workers=None)
    item("other", kind="b", num_workers=None)
    left_out: list = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    before = [*items]
    pytest_collection_modifyitems(SimpleNamespace(hook=hook), items)
    assert items == [plain, sized, other]
    assert left_out == [case for case in before if case not in items]


@pytest.mark.parametrize("name", THREADED)
def test_selected_tests_exist(name):
    """A file or a test that is renamed is missed here, not left out in silence."""
    file, _, test = name.partition("::")
    source = (ROOT / f"tests/test_{file}").read_text()
    assert not test or re.search(rf"^def {test}\(", source, re.MULTILINE)


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_bytecode_is_kept_apart(sanitizer, tmp_path, monkeypatch):
    """It is written even where the caller's environment forbids it: without it each child compiles all it imports."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    env = environment(sanitizer, tmp_path / "lib", tmp_path)
    assert "PYTHONDONTWRITEBYTECODE" not in env
    assert env["PYTHONPYCACHEPREFIX"] == str(tmp_path / "bytecode")
