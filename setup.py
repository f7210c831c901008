"""Builds the extensions dataloader_rs._buffers, _core, _share and _shuffle. All else is in pyproject.toml."""

import os
import sys
from glob import glob

from Cython.Build import cythonize
from setuptools import Extension, setup

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

OPTIMIZE = ["-O3", "-g0"]
if SANITIZE:
    # -O1 keeps the frames of small functions apart, which reports name.
    OPTIMIZE = ["-O1", "-g", "-fno-omit-frame-pointer", f"-fsanitize={SANITIZE}"]
WARNINGS = ["-Wall", "-Wextra"] + (["-Werror"] if os.environ.get("DLRS_WERROR") == "1" else [])

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
    options={"build": {"build_base": BUILD_DIR, **({"build_lib": f"{BUILD_DIR}/lib"} if SANITIZE else {})}},
)
