"""Checks that what is to be uploaded is one whole release. Knows no index.

    python tools/check_release.py v1.2.3 dist

The tag, pyproject.toml and the newest section of CHANGELOG.md have one version, and the folder holds the source
distribution and a wheel for each identifier that cibuildwheel gives, all of that version and no others.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLATFORMS = [("linux", "x86_64"), ("linux", "aarch64"), ("macos", "arm64")]


def identifiers() -> set[tuple[str, str, str]]:
    """The wheels that cibuildwheel would build: interpreter, kind of system, processor."""
    found = set()
    for platform, processor in PLATFORMS:
        command = [sys.executable, "-m", "cibuildwheel", "--print-build-identifiers", "--platform", platform, "--archs",
                   processor, str(ROOT)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for interpreter, system in re.findall(rf"^(\w+)-(\w+)_{processor}$", printed, re.MULTILINE):
            found.add((interpreter, system, processor))
    return found


def faults_of(tag: str, files: list[str], wanted: set[tuple[str, str, str]]) -> list[str]:
    """What keeps the files from being the release with this tag, in words."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\d\S*)", changes, re.MULTILINE)[1]
    unreleased = changes.partition("\n## Unreleased\n")[2].partition("\n## ")[0].strip()
    faults = []
    if tag != f"v{version}":
        faults.append(f"the tag is {tag}, and the version of pyproject.toml {version}")
    if newest != version:
        faults.append(f"the newest version of CHANGELOG.md is {newest}, and that of pyproject.toml {version}")
    if unreleased:
        faults.append("CHANGELOG.md has lines under Unreleased, which belong to this version")
    left = set(files)
    if f"dataloader_rs-{version}.tar.gz" not in left:
        faults.append("the source distribution is missing")
    left.discard(f"dataloader_rs-{version}.tar.gz")
    for interpreter, system, processor in sorted(wanted):
        tags = f"{interpreter.rstrip('t')}-{interpreter}"
        pattern = rf"dataloader_rs-{re.escape(version)}-{tags}-\S*{system}\w*_{processor}\.whl"
        matching = {file for file in left if re.fullmatch(pattern, file)}
        if len(matching) != 1:
            faults.append(f"{interpreter}-{system}_{processor}: {len(matching)} wheels")
        left -= matching
    return faults + [f"{file} is no part of this release" for file in sorted(left)]


def main() -> None:
    tag, folder = sys.argv[1:]
    files = [path.name for path in Path(folder).iterdir() if path.name != "SHA256SUMS"]
    faults = faults_of(tag, files, identifiers())
    if faults:
        sys.exit("\n".join(faults))
    print(f"{tag}: {len(files)} files, as promised")


if __name__ == "__main__":
    main()
