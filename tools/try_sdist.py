"""Tries a source distribution the way a machine with little on it builds it. Knows nothing of how it was made.

    python tools/try_sdist.py dist/NAME.tar.gz

A new virtual environment with pip, the package index, and a PATH with the compiler, its assembler and its linker: a
wheel comes out that can be imported. Without the compiler it says what to install.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

# Names of what compiles. Which of them an interpreter calls is its own affair.
TOOLS = {"as", "cc", "gcc", "ld", (os.environ.get("CC") or sysconfig.get_config_var("CC")).split()[0]}
SAYS = "Install one: `apt install gcc"


def main() -> None:
    (sdist,) = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True, symlinks=True)
        python = str(folder / "venv" / "bin" / "python")
        for bin_folder in ("tools", "nothing"):
            (folder / bin_folder).mkdir()
        for tool in TOOLS:
            path = shutil.which(tool)
            if path:
                (folder / "tools" / Path(tool).name).symlink_to(path)

        def pip_wheel(path: str) -> subprocess.CompletedProcess[str]:
            command = [python, "-m", "pip", "wheel", "--no-deps", "--no-cache-dir", "-w", str(folder),
                       str(sdist.resolve())]
            return subprocess.run(command, cwd=folder / "nothing", env={**os.environ, "PATH": str(folder / path)},
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

        built = pip_wheel("tools")
        if built.returncode:
            sys.exit(f"{built.stdout}\nThe source distribution does not build with {', '.join(sorted(TOOLS))} alone.")
        (wheel,) = folder.glob("*.whl")
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-index", str(wheel)], check=True)
        subprocess.run([python, "-I", "-W", "error", "-c", "from dataloader_rs import *"], check=True,
                       cwd=folder / "nothing")
        print(f"{sdist.name}: {sdist.stat().st_size / 1000:.0f} kB; pip and {', '.join(sorted(TOOLS))} make "
              f"{wheel.name}")
        refused = pip_wheel("nothing")
        if refused.returncode == 0 or SAYS not in refused.stdout:
            sys.exit(f"{refused.stdout}\nWithout a compiler it should fail and say: {SAYS}")
        print("without a compiler it says:",
              next(line for line in refused.stdout.splitlines() if SAYS in line).strip())


if __name__ == "__main__":
    main()
