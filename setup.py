"""Builds the extensions dataloader_rs._buffers, _core, _share and _shuffle. All else is in pyproject.toml."""

import os
import sys
from glob import glob

from Cython.Build import cythonize
from setuptools import Extension, setup

# Generated C and object files differ between interpreters, also between the two builds of 3.13 that share a
# cache tag, and one checkout serves them all.
BUILD_DIR = f"build/{sys.implementation.cache_tag}{sys.abiflags}"

# The C parts of each. A part's header is named even if it is gone: an up-to-date object would hide that it is missing.
C_PARTS = {
    "dataloader_rs/_buffers": ["dataloader_rs/_store"],
    "dataloader_rs/_core": [f"dataloader_rs/_{part}" for part in ("pool", "process", "reorder", "pace", "stopwatch",
                                                                  "gate")],
    "dataloader_rs/_share": [],
    "dataloader_rs/_shuffle": ["dataloader_rs/_order"],
}
HEADERS = {*glob("dataloader_rs/*.h"), *(f"{part}.h" for parts in C_PARTS.values() for part in parts)}

WARNINGS = ["-Wall", "-Wextra"] + (["-Werror"] if os.environ.get("DLRS_WERROR") == "1" else [])

extensions = [
    Extension(
        name.replace("/", "."),
        sources=[f"{name}.pyx", *(f"{part}.c" for part in parts)],
        depends=["setup.py", *sorted(HEADERS)],
        include_dirs=["dataloader_rs"],
        extra_compile_args=["-std=c11", "-O3", "-g0", "-fvisibility=hidden", "-pthread", *WARNINGS],
        extra_link_args=["-pthread"],
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
    options={"build": {"build_base": BUILD_DIR}},
)
