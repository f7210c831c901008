"""Builds the extensions dataloader_rs._buffers, _core, _share and _shuffle. All else is in pyproject.toml."""

import os
import subprocess
import sys
import tempfile
from glob import glob
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# What to build in, for tests/sanitize.py: "thread" or "address,undefined". Nothing of such a build may be taken for a
# part of an ordinary one, so it is built apart, and into a directory instead of in place.
SANITIZE = os.environ.get("DLRS_SANITIZE", "")

# Generated C and object files differ between interpreters, also between the two builds of 3.13 that share a
# cache tag, and one checkout serves them all.
BUILD_DIR = f"build/{sys.implementation.cache_tag}{sys.abiflags}" + f"-{SANITIZE.replace(',', '-')}" * bool(SANITIZE)

# The C parts of each. A part's header is named even if it is gone: an up-to-date object would hide that it is missing.
C_PARTS = {
    "dataloader_rs/_buffers": ["dataloader_rs/_store"],
    "dataloader_rs/_core": [f"dataloader_rs/_{part}" for part in ("pool", "process", "reorder", "pace", "stopwatch",
                                                                  "gate")],
    "dataloader_rs/_share": [],
    "dataloader_rs/_shuffle": ["dataloader_rs/_order"],
}
HEADERS = {*glob("dataloader_rs/*.h"), *(f"{part}.h" for parts in C_PARTS.values() for part in parts)}

# Without -g debuggers know the names of all functions but no lines; with it the wheel is twice as large.
OPTIMIZE = ["-O3", "-g" if os.environ.get("DLRS_DEBUG") == "1" else "-g0"]
if SANITIZE:
    # -O1 keeps the frames of small functions apart, which reports name.
    OPTIMIZE = ["-O1", "-g", "-fno-omit-frame-pointer", f"-fsanitize={SANITIZE}"]
WARNINGS = ["-Wall", "-Wextra"] + (["-Werror"] if os.environ.get("DLRS_WERROR") == "1" else [])

# Flags that harden the code: of each line the first group is used that the compiler takes without a warning. It is
# asked, because that depends on its version, the system, and the processor that is compiled for. Where the flags that
# Python was compiled with define _FORTIFY_SOURCE, ours come later. Sanitizers want to see the calls that it replaces.
IS_SANITIZED = bool(SANITIZE) or "-fsanitize" in os.environ.get("CFLAGS", "")
HARDENED_COMPILE = [
    [["-fstack-protector-strong"]],
    [["-U_FORTIFY_SOURCE", f"-D_FORTIFY_SOURCE={level}"] for level in ([] if IS_SANITIZED else [3, 2])],
]
HARDENED_LINK = [
    [["-Wl,-z,relro,-z,now"]],
    [["-Wl,-z,noexecstack"]],
]


class HardenedBuild(build_ext):
    """Adds those of the flags that harden the code that the compiler takes."""

    def build_extensions(self):
        with tempfile.TemporaryDirectory() as folder:
            source, output = Path(folder, "probe.c"), Path(folder, "probe")
            source.write_text("#include <string.h>\n"  # which looks at _FORTIFY_SOURCE
                              "char *dlrs_probe(char *);\nchar *dlrs_probe(char *text) { return strchr(text, 0); }\n")
            probe = ["-O3", "-fPIC", str(source), "-o", str(output)]
            compile_flags = taken([*self.compiler.compiler_so, "-c", *probe], HARDENED_COMPILE)
            link_flags = taken([*self.compiler.linker_so, *probe], HARDENED_LINK)
        for extension in self.extensions:
            extension.extra_compile_args += compile_flags
            extension.extra_link_args += link_flags
        super().build_extensions()


def taken(command, lines):
    """The first group of flags of each line that makes `command` say nothing and end well."""
    flags = []
    for groups in lines:
        for group in groups:
            finished = subprocess.run([*command, *group], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            if finished.returncode == 0 and not finished.stdout:
                flags += group
                break
    return flags


extensions = [
    Extension(
        name.replace("/", "."),
        sources=[f"{name}.pyx", *(f"{part}.c" for part in parts)],
        depends=["setup.py", *sorted(HEADERS)],
        include_dirs=["dataloader_rs"],
        extra_compile_args=["-std=c11", *OPTIMIZE, "-fvisibility=hidden", "-pthread", *WARNINGS],
        extra_link_args=["-pthread", *([f"-fsanitize={SANITIZE}"] if SANITIZE else [])],
    )
    for name, parts in C_PARTS.items()
]

setup(
    ext_modules=cythonize(
        extensions,
        build_dir=BUILD_DIR,
        quiet=True,
        compiler_directives={"language_level": 3, "freethreading_compatible": True},
    ),
    cmdclass={"build_ext": HardenedBuild},
    options={"build": {"build_base": BUILD_DIR, **({"build_lib": f"{BUILD_DIR}/lib"} if SANITIZE else {})}},
)
