"""Run the tests with the extension built under a sanitizer, and judge every report, of child processes too.

    python tests/sanitize.py thread [pytest's arguments]
        ThreadSanitizer, on a free-threaded CPython that is built with it (--disable-gil --with-thread-sanitizer), and
        the tests in which threads meet.
    python tests/sanitize.py address [pytest's arguments]
        AddressSanitizer and UndefinedBehaviorSanitizer, on a build with the GIL, and all tests but those below.

`make tsan` and `make asan` do this. Reports go to files below build/, one for each process that has something to say,
so that none is lost in the output of a child. A report of ThreadSanitizer with a frame of ours is a fault, unless
tests/tsan_explained.txt says why it is none; one that has frames of the interpreter or of NumPy only is counted and
listed. Any report of the other two is a fault.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXPLAINED = ROOT / "tests" / "tsan_explained.txt"

# The tests in which threads meet: on user code, on the pool, or on what is shared between loaders; a file, or a test.
# The interpreter is many times slower under ThreadSanitizer, so of files that go the same way through the pool
# one is here: what the tests of samplers, seeds, generators, order and the shape of batches say of threads is which
# values arrive. Most of test_share.py walks objects on one thread. test_exit.py, test_fork.py and test_leaks.py are
# child processes, each of which starts for seconds; some of these are in the files below.
THREADED = ["threads.py", "shutdown.py", "garbage.py", "lifetime.py", "timeout.py", "adaptive.py", "stream.py",
            "worker_info.py", "across_epochs.py", "errors.py",
            "buffers.py::test_delivered_batches_are_never_overwritten",
            "buffers.py::test_threads_share_the_store",
            "buffers.py::test_batch_that_dies_on_another_thread_gives_its_memory_back_at_once",
            "share.py::test_workers_read_a_table_while_it_is_shared",
            "share.py::test_leaf_of_another_thread_is_left_alone"]

# NOTE [ fork and the address sanitizer ] The runtime of GCC 12 does not see to its own locks when a process forks. A
# child that was forked while another thread allocated, or was born, hangs in malloc or pthread_create: so does a C
# program of 20 lines, at one of its first forks. The tests of make test run them without a sanitizer.

# What a sanitizer makes meaningless, by file or by the beginning of a test's id, and why.
LEFT_OUT = {
    "address": {
        "test_benchmarks.py": "judges times",
        "test_c.py": "builds programs with sanitizers of its own, which the preloaded one would meet",
        "test_fork.py": "see NOTE [ fork and the address sanitizer ]",
        "test_generator.py::test_each_epoch_is_keyed_by_one_number":
            "adds up lists of 70,000, each in fresh memory",
        "test_hardening.py::test_library_calls_are_checked": "a build with sanitizers does without _FORTIFY_SOURCE",
        "test_leaks.py::test_one_object_for_each_time_is_found": "neither allocator that it counts with is in use",
        "test_lifetime.py::test_process_forked_while_workers_are_born_can_load":
            "see NOTE [ fork and the address sanitizer ]",
        "test_memory.py": "judges the size of the process, most of which is the sanitizer's here",
        "test_pace.py": "judges times",
        "test_resources.py::test_no_room_for_stacks_is_a_runtime_error":
            "limits the address space, of which the sanitizer takes terabytes",
        "test_sample_rng.py::test_item_of_a_worker_goes_on_with_a_greenlet_of_the_one_before":
            "greenlet copies whole stacks, with what the sanitizer puts between their variables",
        "test_sample_rng.py::test_items_of_greenlets_take_turns": "see the one before",
        "test_shutdown.py::test_loops_left_early_leave_nothing_behind": "judges the size of the process",
        "test_tools.py::test_gdb_shows_functions_by_name": "gdb reads the symbols of the sanitizer for minutes",
    },
    "thread": {
        "test_shutdown.py::test_loops_left_early_leave_nothing_behind": "judges the size of the process",
    },
}

# How much longer than usual a test may take, see conftest.py.
SLOWDOWN = {"address": 4, "thread": 10}

@dataclasses.dataclass
class Report:
    """One report: what it is about, and its text."""

    kind: str
    text: str

    @property
    def frames(self) -> list[str]:
        return [line.strip() for line in self.text.splitlines() if re.match(r"\s+#\d+ ", line)]

    @property
    def is_ours(self) -> bool:
        """Is there a frame of this package's C code?"""
        return any(re.search(r"\bdataloader_rs/|\bdlrs_\w", frame) for frame in self.frames)

    @property
    def title(self) -> str:
        """The kind, and the innermost frame of each stack."""
        innermost = re.compile(r"#0 (?:0x[0-9a-f]+ in )?(\S+)")
        first = [found[1] for found in map(innermost.match, self.frames) if found]
        return " / ".join([self.kind, *first[:2]])


def reports_in(text: str) -> list[Report]:
    """The reports in what a sanitizer wrote."""
    found = []
    for piece in re.split(r"^={18,}$", text, flags=re.MULTILINE):
        begun = re.search(r"(?:WARNING|ERROR|FATAL): (?:Thread|Address|Leak)Sanitizer:? ?(.*)", piece)
        if begun:
            kind = re.sub(r" \(pid=\d+\)| on (?:unknown )?address .*", "", begun[1]).strip()
            found.append(Report(kind, piece.strip()))
    for piece in re.split(r"(?=^\S+:\d+:\d+: runtime error: )", text, flags=re.MULTILINE):
        begun = re.match(r"\S+: runtime error: (.*)", piece)
        if begun:
            found.append(Report(f"undefined behaviour: {begun[1]}", piece.strip()))
    if not found and text.strip():
        found.append(Report("unreadable", text.strip()))
    return found


def explanations(text: str) -> dict[str, str]:
    """``kind:regular expression`` for a frame of ours, and the reason, which is the comment before it."""
    found = {}
    reason: list[str] = []
    for line in text.splitlines():
        if line.startswith("#"):
            reason.append(line[1:].strip())
        elif line.strip():
            if not reason:
                raise ValueError(f"no reason is given for {line}")
            found[line.strip()] = " ".join(reason)
        else:
            reason = []
    return found


def is_explained(report: Report, known: Iterable[str]) -> bool:
    """Is there an entry whose kind begins the report's and whose expression is found in a frame?"""
    entries = (entry.split(":", 1) for entry in known)
    return any(report.kind.startswith(kind) and any(re.search(wanted, frame) for frame in report.frames)
               for kind, wanted in entries)


def judge(sanitizer: str, reports: list[Report], known: Iterable[str]) -> list[Report]:
    """Those of `reports` that are faults."""
    if sanitizer == "address":
        return reports
    return [report for report in reports
            if (report.is_ours and not is_explained(report, known)) or report.kind == "unreadable"]


def summary(reports: list[Report]) -> str:
    """The titles, each with its number, the most frequent first."""
    counted = collections.Counter(report.title for report in reports)
    return "".join(f"{number:6}  {title}\n" for title, number in counted.most_common())


def environment(sanitizer: str, library: Path, logs: Path) -> dict[str, str]:
    """What the tests, and the processes they start, run with."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(library), str(ROOT / "tests")]), "PYTHONSAFEPATH": "1",
           "DLRS_SLOWDOWN": str(SLOWDOWN[sanitizer])}
    # Without bytecode each process would compile all that it imports, which takes more than a minute.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    env["PYTHONPYCACHEPREFIX"] = str(library.parent / "bytecode")
    log = f"log_path={logs / 'report'}"
    if sanitizer == "thread":
        suppressions = sorted(Path(sys.base_prefix).glob("share/tsan/*.txt"))
        merged = logs / "suppressions.txt"
        merged.write_text("".join(path.read_text() for path in suppressions))
        # A fork with threads is what test_fork.py is about. A report must not change how a process ends.
        env["TSAN_OPTIONS"] = (f"{log}:suppressions={merged}:halt_on_error=0:exitcode=0:die_after_fork=0:"
                               "allocator_may_return_null=1:history_size=7")
    else:
        runtimes = [subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True,
                                   check=True).stdout.strip() for name in ("libasan.so", "libubsan.so")]
        env["LD_PRELOAD"] = " ".join(runtimes)
        # The interpreter keeps what it needs to the end, which LeakSanitizer takes for leaks; see test_leaks.py.
        # CPython ends a thread that comes for the GIL at exit, and does not unwind its frames. What these had marked on
        # the stack the runtime would then trip over when it takes back its own stack for signals: it gets none.
        env["ASAN_OPTIONS"] = (f"{log}:detect_leaks=0:allocator_may_return_null=1:detect_stack_use_after_return=0:"
                               "use_sigaltstack=0")
        env["UBSAN_OPTIONS"] = f"{log}:print_stacktrace=1:halt_on_error=0"
        # One block for each object, so that what lies behind its end is nobody else's.
        env["PYTHONMALLOC"] = "malloc"
    return env


def launcher(sanitizer: str, env: dict[str, str]) -> list[str]:
    """What to start Python with. Older runtimes of ThreadSanitizer need addresses that are not randomised."""
    for prefix in [[], ["setarch", platform.machine(), "-R"]]:
        command = [*prefix, sys.executable, "-c", "pass"]
        is_there = not prefix or shutil.which(prefix[0])
        if is_there and subprocess.run(command, env=env, capture_output=True).returncode == 0:
            return prefix
    sys.exit(f"an empty program fails here under the {sanitizer} sanitizer")


def selected(sanitizer: str) -> list[str]:
    """Arguments of pytest: which tests."""
    arguments = ["-m", "not timing"]
    if sanitizer == "thread":
        arguments += [f"tests/test_{name}" for name in THREADED]
        arguments += ["-p", "sanitize"]  # for pytest_collection_modifyitems below
    for name in LEFT_OUT[sanitizer]:
        arguments.append(f"--deselect=tests/{name}" if "::" in name else f"--ignore=tests/{name}")
    return arguments


def pytest_collection_modifyitems(config, items: list) -> None:
    """Of each test keep one case under ThreadSanitizer: that with most workers, and of these with most in parallel."""
    best: dict[str, tuple] = {}
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        size = [parameters.get(name) for name in ("num_workers", "items_in_parallel")]
        size = [number if isinstance(number, int) else 0 for number in size]
        name = item.nodeid.split("[")[0]
        if name not in best or size > best[name][0]:
            best[name] = (size, item)
    chosen = [item for _, item in best.values()]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def main(sanitizer: str, arguments: list[str]) -> int:
    if sanitizer == "thread" and not (sysconfig.get_config_var("Py_GIL_DISABLED") and "--with-thread-sanitizer" in (
            sysconfig.get_config_var("CONFIG_ARGS") or "")):
        sys.exit(f"{sys.executable} is not a free-threaded CPython built with --with-thread-sanitizer")
    if sanitizer == "address" and sysconfig.get_config_var("Py_GIL_DISABLED"):
        sys.exit("free-threaded builds do not let the sanitizer see their objects (PYTHONMALLOC): use one with the GIL")
    flags = {"thread": "thread", "address": "address,undefined"}[sanitizer]
    base = ROOT / f"build/{sys.implementation.cache_tag}{sys.abiflags}-{flags.replace(',', '-')}"
    quiet = {"TSAN_OPTIONS": "report_bugs=0"} if sanitizer == "thread" else {}
    env = {**os.environ, **quiet, "DLRS_SANITIZE": flags, "DLRS_BUILD_DIR": str(base.relative_to(ROOT))}
    # Cython was not done after 12 minutes under ThreadSanitizer. The C that it generates is the same everywhere, so an
    # ordinary interpreter that has Cython may do that: setup.py generates whatever it is asked for.
    cython = os.environ.get("DLRS_CYTHON_PYTHON")
    if cython:
        subprocess.run([cython, "setup.py", "-q", "--version"], cwd=ROOT, check=True, env=env,
                       stdout=subprocess.DEVNULL)
    subprocess.run([sys.executable, "setup.py", "-q", "build"], cwd=ROOT, check=True, env=env)
    logs = base / "reports"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    env = environment(sanitizer, base / "lib", logs)
    limit = 60 * SLOWDOWN[sanitizer]
    status = subprocess.run([*launcher(sanitizer, env), sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o",
                             f"faulthandler_timeout={limit}", *(arguments or selected(sanitizer))],
                            cwd=ROOT, env=env).returncode

    texts = [path.read_text(errors="replace") for path in sorted(logs.glob("report.*"))]
    reports = [report for text in texts for report in reports_in(text)]
    faults = judge(sanitizer, reports, explanations(EXPLAINED.read_text()))
    others = [report for report in reports if report not in faults]
    if others:
        print(f"\n{len(others)} reports without an unexplained frame of ours:\n{summary(others)}", end="")
    for report in faults:
        print(f"\n{report.text}")
    print(f"\n{sanitizer} sanitizer: {len(reports)} reports in {logs.relative_to(ROOT)}, {len(faults)} of them faults; "
          f"pytest ended with {status}")
    if faults:
        print(summary(faults), end="")
    return 1 if faults else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
