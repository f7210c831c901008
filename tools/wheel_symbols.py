"""Lists what the extensions in a wheel ask of the system. Knows no policies but a version of glibc.

    python tools/wheel_symbols.py dist/NAME.whl [--glibc 2.28]

For each extension: the libraries it needs, where it searches them, and its symbols by the version of glibc that has
them. With --glibc it fails if the dynamic linker of that glibc would refuse one of them: a newer version of a symbol,
another library, or a search path of the machine that built it.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import zipfile
from pathlib import Path

from elftools.elf.elffile import ELFFile

# The parts of glibc. Others may be missing on the machine that the wheel gets to.
GLIBC = {"libc.so.6", "libpthread.so.0", "libm.so.6", "libdl.so.2", "librt.so.1", "ld-linux-x86-64.so.2",
         "ld-linux-aarch64.so.1"}


def number(version: str) -> tuple[int, ...]:
    """`GLIBC_2.3.4` and `2.3.4` as (2, 3, 4)."""
    return tuple(map(int, version.removeprefix("GLIBC_").split(".")))


def order(version: str) -> tuple[int, ...]:
    """Where it stands among versions of glibc; other libraries' and marks like GLIBC_ABI_DT_RELR come last."""
    return number(version) if re.fullmatch(r"GLIBC_[0-9.]+", version) else (sys.maxsize,)


def report(name: str, elf: ELFFile, newest: tuple[int, ...] | None) -> list[str]:
    """Print what the extension asks for; what a system with that glibc would not have, in words."""
    tags = list(elf.get_section_by_name(".dynamic").iter_tags())
    needed = [tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"]
    paths = [getattr(tag, tag.entry.d_tag[3:].lower()) for tag in tags if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH")]
    names_of = {entry.entry.vna_other: entry.name
                for _, entries in elf.get_section_by_name(".gnu.version_r").iter_versions() for entry in entries}
    versions = elf.get_section_by_name(".gnu.version")
    by_version: dict[str, list[str]] = {version: [] for version in names_of.values()}
    for index, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
        version = names_of.get(versions.get_symbol(index).entry["ndx"])
        if version:
            by_version[version].append(symbol.name)
    print(f"{name}: needs {', '.join(needed)}" + "".join(f"; searches {path}" for path in paths))
    for version in sorted(by_version, key=order):
        print(f"    {version}: {' '.join(sorted(by_version[version]))}")
    if newest is None:
        return []
    return [
        *(f"{name}: {symbol} is of {version}" for version, symbols in by_version.items() if order(version) > newest
          for symbol in symbols or ["no symbol"]),
        *(f"{name}: {library} is no part of glibc" for library in needed if library not in GLIBC),
        *(f"{name}: libraries are searched in {path}" for path in paths),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--glibc", type=number)
    options = parser.parse_args()
    faults, found = [], 0
    with zipfile.ZipFile(options.wheel) as wheel:
        for name in sorted(wheel.namelist()):
            if name.endswith(".so"):
                found += 1
                faults += report(name, ELFFile(io.BytesIO(wheel.read(name))), options.glibc)
    if not found:
        faults.append(f"{options.wheel} holds no extension")
    if faults:
        sys.exit("\n".join(faults))
    if options.glibc:
        print(f"glibc {'.'.join(map(str, options.glibc))} has all of these symbols, in their versions")


if __name__ == "__main__":
    main()
