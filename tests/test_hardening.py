"""What the package is made of: hardened code, nothing that runs data as code, no files but what it is asked for."""

from __future__ import annotations

import ast
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tokenize
from pathlib import Path

import pytest

import dataloader_rs

PACKAGE = Path(dataloader_rs.__file__).parent
ROOT = Path(__file__).parents[1]
EXTENSIONS = sorted(PACKAGE.glob(f"*{sysconfig.get_config_var('EXT_SUFFIX')}"))

# ---- the compiled code ----


def readelf(extension: Path, *options: str) -> str:
    if sys.platform != "linux":
        pytest.skip("only Linux has ELF files")
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed: it is in binutils")
    command = ["readelf", "--wide", *options, str(extension)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_there_are_extensions():
    """All four were found: the tests below look at each."""
    assert {extension.name.split(".")[0] for extension in EXTENSIONS} == {"_buffers", "_core", "_share", "_shuffle"}


every_extension = pytest.mark.parametrize("extension", EXTENSIONS, ids=lambda extension: extension.name.split(".")[0])


@every_extension
def test_no_memory_is_both_written_and_executed(extension):
    """The stack is not executable, no segment can be written and executed, and the code needs no relocation."""
    segments = re.findall(r"^ +(\w+) +(?:0x\w+ +){5}(R?)( ?W?)( ?E?) ", readelf(extension, "--segments"), re.MULTILINE)
    assert "GNU_STACK" in {kind for kind, *_ in segments}
    assert not [kind for kind, _, write, execute in segments if write.strip() and execute.strip()]
    assert "TEXTREL" not in readelf(extension, "--dynamic")


@every_extension
def test_what_the_linker_fills_in_is_read_only(extension):
    """RELRO, and bound at once, so that no pointer to a function lies in memory that can be written."""
    assert "GNU_RELRO" in readelf(extension, "--segments")
    assert re.search(r"\((?:FLAGS|BIND_NOW)\).*BIND_NOW|FLAGS_1\).*NOW", readelf(extension, "--dynamic"))


@every_extension
def test_libraries_are_searched_where_python_is(extension):
    """There is no search path for libraries but the one that this Python links every extension with."""
    found = re.findall(r"\(R(?:UN)?PATH\).*\[(.*)\]", readelf(extension, "--dynamic"))
    linked = " ".join(str(sysconfig.get_config_var(name)) for name in ("LDSHARED", "LDFLAGS", "PY_LDFLAGS"))
    allowed = re.findall(r"-rpath[=,](?:-Wl,)?([^ ,]+)", linked + " " + os.environ.get("LDFLAGS", ""))
    assert {folder for path in found for folder in path.split(":")} <= set(allowed)


@every_extension
def test_stack_is_protected(extension):
    """Functions with arrays, or with variables whose address is taken, check that nobody wrote beyond them."""
    assert "__stack_chk_fail" in readelf(extension, "--dyn-syms")


def test_library_calls_are_checked():
    """_FORTIFY_SOURCE is on: calls that write to memory of a size that is known are checked."""
    if "-fsanitize" in os.environ.get("CFLAGS", ""):
        pytest.skip("a build with sanitizers does without _FORTIFY_SOURCE")
    symbols = "".join(readelf(extension, "--dyn-syms") for extension in EXTENSIONS)
    assert re.search(r" __(?!stack)\w+_chk@", symbols)


@every_extension
def test_only_the_module_is_visible(extension):
    """Of all functions only the one that Python calls is exported, so no other library can take the place of one."""
    symbols = re.findall(r"(?:FUNC|OBJECT) +(?:GLOBAL|WEAK) +DEFAULT +\d+ (\w+)", readelf(extension, "--dyn-syms"))
    assert symbols == [f"PyInit_{extension.name.split('.')[0]}"]


# What comes with processors of the last ten years, and not with each x86-64: AVX, FMA, BMI, and counting of bits.
NEWER = re.compile(r"\t(?:v\w+ .*%[xyz]mm"
                   r"|(?:popcnt|lzcnt|andn|bextr|blsr|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx)[lq]? )")


def functions_with_newer_instructions(code: str) -> set[str]:
    """The names of those functions in the output of objdump; that of the section where there are no names."""
    found, function = set(), ""
    for line in code.splitlines():
        if line.endswith(">:"):
            function = line[line.index("<") + 1 : -2]
        elif NEWER.search(line):
            found.add(function)
    return found


@every_extension
def test_code_runs_on_any_processor(extension):
    """Only functions whose name says so, which are called if the processor has them, use newer instructions."""
    if os.uname().machine != "x86_64" or shutil.which("objdump") is None:
        pytest.skip("needs x86-64, and objdump, which is in binutils")
    if "-march" in f"{sysconfig.get_config_var('CFLAGS')} {os.environ.get('CFLAGS', '')}":
        pytest.skip("this Python compiles its extensions for newer processors")
    code = subprocess.run(["objdump", "-d", "--no-show-raw-insn", str(extension)], capture_output=True, text=True,
                          check=True).stdout
    assert "\tmov" in code
    found = functions_with_newer_instructions(code)
    if extension.name.startswith("_shuffle") and ".symtab" not in readelf(extension, "--sections"):
        return  # the one that has such functions, without their names
    assert {name for name in found if not name.endswith("_avx2")} == set()


def test_newer_instructions_are_seen():
    """What a compiler makes of -march=native is told from what it makes of plain x86-64."""
    code = "0000 <plain>:\n 0:\tmovups (%rax),%xmm0\n 1:\tret\n0010 <{}>:\n 10:\t{}\n"
    for line in ("vmovdqu (%rax),%ymm0", "vpxor  %xmm0,%xmm0,%xmm0", "popcnt %rax,%rbx", "shlx   %rax,%rbx,%rcx",
                 "andn   %eax,%ebx,%ecx", "vaddpd %zmm0,%zmm1,%zmm2"):
        assert functions_with_newer_instructions(code.format("newer", line)) == {"newer"}, line
    assert functions_with_newer_instructions(code.format("other", "verr   %ax")) == set()


# ---- the sources ----

# Names that would run data as code, start a program, reach the network or write files.
FORBIDDEN_NAMES = {"eval", "exec", "compile", "open", "__import__", "breakpoint", "system", "popen", "mkstemp", "mkdir",
                   "makedirs", "unlink", "rename", "write_text", "write_bytes", "loads", "fopen", "mmap", "dlopen"}
ALLOWED_MODULES = {
    # Of the language, and of containers and functions.
    "__future__", "array", "collections", "copy", "functools", "itertools", "math", "operator", "reprlib", "struct",
    "types", "typing", "warnings", "weakref", "inspect", "traceback",
    # Beside traceback, in what CPython shows errors with, imported in time and never called.
    "ast", "tokenize",
    # Threads, and what they wait for; workers are stopped at exit.
    "atexit", "sys", "threading", "time",
    # For os.urandom, and hashlib to make numbers of it.
    "hashlib", "os",
    # importlib.metadata: the version. It reads a file when it is imported.
    "importlib",
    # To tell the interpreter that it is in from others.
    "_thread", "_xxsubinterpreters",
    # To know a random.Random, and for type checkers.
    "random", "typing_extensions",
    # Of users who have them, for what default_collate, generators and pin_memory are given.
    "numpy", "torch",
    # Ours, and C declarations.
    "cpython", "cython", "dataloader_rs", "libc",
}


IMPORT = re.compile(r"^ *(?:from +(\w+)[\w.]* +c?import|c?import +(\w+))", re.MULTILINE)


def python_sources() -> list[Path]:
    return sorted(PACKAGE.glob("*.py"))


def cython_sources() -> list[Path]:
    found = sorted(path for kind in ("pyx", "pxi", "pxd") for path in PACKAGE.glob(f"*.{kind}"))
    if not found:
        pytest.skip("the sources of the extensions are not where the package is")
    return found


def test_python_runs_no_data_as_code_and_opens_no_files():
    """No module of the package imports or calls what could: pickle, eval, subprocess, tempfile, sockets, open."""
    used, imported = set(), set()
    for path in python_sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Name):
                used.add((path.name, node.id))
            elif isinstance(node, ast.Attribute):
                used.add((path.name, node.attr))
            elif isinstance(node, ast.Import):
                imported |= {(path.name, alias.name.split(".")[0]) for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((path.name, (node.module or "").split(".")[0]))
    assert len(used) > 500
    assert not {(file, name) for file, name in used if name in FORBIDDEN_NAMES}
    assert not {(file, name) for file, name in imported if name not in ALLOWED_MODULES}


def test_cython_runs_no_data_as_code_and_opens_no_files():
    """The same of the extensions, token by token."""
    found, imported = set(), set()
    for path in cython_sources():
        source = path.read_text(encoding="utf-8")
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        found |= {(path.name, token.string) for token in tokens if token.type == tokenize.NAME}
        imported |= {(path.name, after_from or module) for after_from, module in IMPORT.findall(source)}
    assert len(found) > 500
    assert not {(file, name) for file, name in found if name in FORBIDDEN_NAMES}
    assert not {(file, name) for file, name in imported if name not in ALLOWED_MODULES}


# ---- at run time ----

EPOCHS = """
    import sys, threading
    import numpy as np
    from dataloader_rs import PyDataloader, PyDataset, PyIterableDataset, default_collate

    events = set()
    lock = threading.Lock()

    def hook(event, arguments):
        if not watching or threading.get_ident() in apart:
            return
        if event == "open" and isinstance(arguments[1], str) and not set("wax+") & set(arguments[1]) \\
                and not (arguments[2] or 0) & WRITING:
            return
        if event.split(".")[0] in ("open", "socket", "subprocess", "os", "shutil", "tempfile", "pickle", "exec",
                                   "compile", "ctypes", "mmap", "marshal"):
            with lock:
                events.add((event, str(arguments)[:200]))

    import os
    WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND
    watching, apart = False, set()
    sys.addaudithook(hook)

    class Items(PyDataset):
        def __len__(self):
            return 64
        def __getitem__(self, index):
            if sys.argv[1] == "open" and index == 40:
                open(os.devnull, "w").close()
            if sys.argv[1] == "eval" and index == 40:
                eval("1 + 1")
            return {"x": np.full(600, index), "name": str(index)}

    def epochs():
        for num_workers in (0, 2):
            for loader in (
                PyDataloader(Items(), 4, num_workers=num_workers, shuffle=True, collate_fn=default_collate),
                PyDataloader(Items(), 4, num_workers=num_workers, in_order=False, across_epochs=True),
                PyDataloader(PyIterableDataset.of(range(64)), 4, num_workers=num_workers),
            ):
                for _ in range(2):
                    assert len(list(loader)) == 16
                repr(loader)
                loader.close()

    if sys.argv[1] == "none":
        epochs()  # imports what is imported late
    watching = True
    epochs()
    watching = False
    print(sorted({event for event, _ in events}), file=sys.stdout)
"""


def test_epochs_touch_no_files(run_script):
    """Epochs of every kind open no file for writing, no socket and no pickle, start nothing and compile nothing."""
    assert run_script(EPOCHS, "none").stdout == "[]\n"


@pytest.mark.parametrize("planted", ["open", "eval"])
def test_a_dataset_that_does_is_seen(run_script, planted):
    """The check above looks at workers, too: what a dataset does there it finds."""
    assert planted.replace("eval", "exec") in run_script(EPOCHS, planted).stdout


# ---- the source distribution ----

# What is in the repository and of no use to who builds from the sources.
NOT_DISTRIBUTED = {".gitignore", ".ci/run",
                   *(f".github/workflows/{name}.yml" for name in ("release", "test", "wheels"))}

# What pip does for a source distribution. To compile to C takes half a minute and says nothing about files: empty ones
# are made in its place.
SDIST = """
import os, sys, types

def cythonize(extensions, build_dir, **options):
    for extension in extensions:
        generated = os.path.join(build_dir, extension.sources[0].replace(".pyx", ".c"))
        os.makedirs(os.path.dirname(generated), exist_ok=True)
        open(generated, "w").close()
        extension.sources[0] = generated
    return extensions

sys.modules["Cython"] = types.ModuleType("Cython")
sys.modules["Cython.Build"] = types.ModuleType("Cython.Build")
sys.modules["Cython.Build"].cythonize = cythonize
from setuptools import build_meta
build_meta.build_sdist("dist")
"""


@pytest.mark.slow
def test_source_distribution_holds_the_sources_and_nothing_else(tmp_path):
    """Just the files of the repository: no generated C, no extension, no cache, nothing that lies about."""
    if not (ROOT / "setup.py").exists() or shutil.which("git") is None:
        pytest.skip("needs git, and the repository")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("needs the repository: " + listed.stderr)
    # Only what exists: a file may be deleted and not committed yet.
    files = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    tree = tmp_path / "tree"
    for name in files:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tree / name)
    for name in ("dataloader_rs/_core.so", "dataloader_rs/__pycache__/loader.pyc", "build/cpython/_core.c",
                 "tests/__pycache__/conftest.pyc", "notes.txt"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).touch()
    built = subprocess.run([sys.executable, "-c", SDIST], cwd=tree, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (archive,) = (tree / "dist").iterdir()
    with tarfile.open(archive) as distribution:
        members = {member.name.partition("/")[2] for member in distribution.getmembers() if not member.isdir()}
    made = {name for name in members if name == "PKG-INFO" or name == "setup.cfg" or ".egg-info/" in name}
    assert members - made == files - NOT_DISTRIBUTED
