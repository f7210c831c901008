"""Builds and runs the C tests, so that pytest is the one entry. They need a C compiler and no Python.

`tests/c/test_<part>.c` is linked with `dataloader_rs/_<part>.c`, or with the parts that it is about and what they are
built on. `test_faults.c` and `test_interleavings.c` contain the sources they test, and `test_watch.c` one of them.

Each runs as it is, under AddressSanitizer with UndefinedBehaviorSanitizer, and where there are threads or memory that
they hand over, under ThreadSanitizer and valgrind's memcheck. (helgrind does not know C11 atomics.) With DLRS_C_LONG=1,
as `make ctest-long` says it, they do many more rounds.
"""

import functools
import itertools
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).parent / "c"
PACKAGE = Path(__file__).parents[1] / "dataloader_rs"
POOL = ["worker", "claim", "epoch", "pool", "process", "reorder", "pace", "turns", "stopwatch", "gate"]
PARTS = {"pool": POOL, "epochs": POOL, "matrix": POOL, "faults": [], "interleavings": [], "watch": POOL[1:],
         "awake": POOL}

COMMON = ["-std=c11", "-pthread", f"-I{PACKAGE}"]
VARIANTS = {
    "plain": ["-O2", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror"],
    "address": ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-O1", "-g", "-fsanitize=thread"],
    "memcheck": ["-O1", "-g", "-DCHECK_NO_FORK"],
}
ONLY_FOR = {
    "thread": {"pool", "epochs", "faults", "matrix", "watch", "awake"},
    "memcheck": {"pool", "epochs", "faults", "matrix", "reorder"},
}
MEMCHECK = ["valgrind", "--quiet", "--fair-sched=yes", "--error-exitcode=9", "--leak-check=full"]
MEMCHECK += ["--show-leak-kinds=definite", "--errors-for-leak-kinds=definite"]

LONG = os.environ.get("DLRS_C_LONG") == "1"

# Percent of the usual rounds, and of those of a long test, where they are not 100 and LONG_ROUNDS. For the matrix they
# are a part of all shapes, for the interleavings less than 100 and more than 100 are bounds one less and one more.
LONG_ROUNDS = 300
ROUNDS = {
    ("matrix", "address"): (25, 100),
    ("matrix", "thread"): (15, 100),
    ("matrix", "memcheck"): (2, 50),
    ("interleavings", "plain"): (50, 1000),
    ("interleavings", "address"): (50, 100),
    ("pool", "memcheck"): (1, 20),
    ("epochs", "memcheck"): (1, 20),
    ("faults", "memcheck"): (1, 20),
    ("reorder", "memcheck"): (3, 20),
}

# Below faulthandler_timeout, so that a program that hangs fails its own test and no other.
TIME_LIMIT = 1200.0 if LONG else 50.0


def programs_and_variants() -> list[tuple[str, str]]:
    """Every test program with each variant that can tell something about it."""
    parts = sorted(path.stem.removeprefix("test_") for path in PROGRAMS.glob("test_*.c"))
    pairs = itertools.product(parts, VARIANTS)
    too_long = set() if LONG else {("interleavings", "address")}
    return [pair for pair in pairs if pair[0] in ONLY_FOR.get(pair[1], parts) and pair not in too_long]


@functools.cache
def compiler() -> list[str]:
    """The command that calls the C compiler: $CC, else what the system has as cc or gcc."""
    for command in [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc"]:
        if shutil.which(shlex.split(command)[0]):
            return shlex.split(command)
    pytest.fail("no C compiler: install gcc, or set CC")


def build(program: Path, sources: list[Path], flags: list[str]) -> subprocess.CompletedProcess[str]:
    """Compile and link `sources` to `program`."""
    command = [*compiler(), *COMMON, *flags, *map(str, sources), "-o", str(program), "-lm"]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def rounds(part: str, variant: str) -> list[str]:
    """The argument of a program: how many percent of the usual rounds it does. test_order.c has no rounds."""
    return [] if part == "order" else [str(ROUNDS.get((part, variant), (100, LONG_ROUNDS))[LONG])]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, or fail with what it had printed by TIME_LIMIT."""
    try:
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIME_LIMIT
        )
    except subprocess.TimeoutExpired as expired:
        printed = (expired.output or b"").decode(errors="replace")
        pytest.fail(f"{' '.join(command)} did not end in {TIME_LIMIT} s\n{printed}")


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """What to put before a program of a variant; skips where the sanitizer or valgrind is not to be had.

    ThreadSanitizer of older compilers cannot place its shadow memory where the kernel randomises addresses
    widely, so there programs run under `setarch -R`.
    """

    @functools.cache
    def probe(variant: str) -> tuple[list[str], str]:
        folder = tmp_path_factory.mktemp(f"probe-{variant}")
        source = folder / "empty.c"
        source.write_text("int main(void) { return 0; }\n")
        built = build(folder / "empty", [source], VARIANTS[variant])
        if built.returncode:
            return [], f"{compiler()[0]} cannot build for {variant}: {built.stdout}"
        prefixes: list[list[str]] = [MEMCHECK if variant == "memcheck" else []]
        if shutil.which("setarch"):
            prefixes.append(["setarch", platform.machine(), "-R"])
        for prefix in prefixes:
            ran = run([*prefix, str(folder / "empty")])
            if ran.returncode == 0:
                return prefix, ""
        return [], f"an empty program fails here under {variant}: {ran.stdout}"

    def prefix_of(variant: str) -> list[str]:
        if variant == "plain":
            return []
        if variant == "memcheck" and not shutil.which(MEMCHECK[0]):
            pytest.skip("valgrind is not installed")
        prefix, missing = probe(variant)
        if missing:
            pytest.skip(missing)
        return prefix

    return prefix_of


@pytest.mark.parametrize(("part", "variant"), programs_and_variants())
def test_c_program_builds_and_passes(part: str, variant: str, launcher, tmp_path: Path):
    """The program compiles without a warning and exits with 0; the sanitizers and valgrind find nothing."""
    program = tmp_path / f"test_{part}"
    sources = [PROGRAMS / f"test_{part}.c", *(PACKAGE / f"_{name}.c" for name in PARTS.get(part, [part]))]
    prefix = launcher(variant)
    built = build(program, sources, VARIANTS[variant])
    if built.returncode:
        pytest.fail(f"does not compile:\n{built.stdout}", pytrace=False)
    ran = run([*prefix, str(program), *rounds(part, variant)])
    if ran.returncode:
        pytest.fail(f"exit code {ran.returncode}:\n{ran.stdout}", pytrace=False)
