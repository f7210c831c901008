"""Tries a wheel the way a machine without compiler and network gets it. Knows nothing of how it was built.

    python tools/try_wheel.py dist/NAME.whl --wheels FOLDER [--suite]

A new virtual environment, no index and an empty PATH: the wheel is installed alone, imported, its size and the time of
the import are printed. Then NumPy comes out of FOLDER, a folder of wheels, and the examples of the README run. With
--suite the commands follow with which cibuildwheel tries each wheel, those of pyproject.toml.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# How often Python is started to see how long it takes. The time is printed and not judged, since it depends on what
# else runs; what an import may bring along is judged by tests/test_import.py.
ROUNDS = 15

# Prints what an import of the wheel has to be, and all that it must not bring along.
ABOUT = """
import sys, sysconfig
import dataloader_rs
free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
assert "numpy" not in sys.modules and "torch" not in sys.modules, "an import brings in libraries that it does not need"
from dataloader_rs import *  # which brings in all extensions
assert not free_threaded or not sys._is_gil_enabled(), "an extension has turned the GIL on"
assert dataloader_rs.__file__.startswith(sys.prefix), dataloader_rs.__file__
assert list(dataloader_rs.PyDataloader(dataloader_rs.PyDataset.of(range(5)), 2, num_workers=2)) == [[0, 1], [2, 3], [4]]
print(dataloader_rs.__version__)
"""

# The least time of several starts, with and without the import in turn: other programs only ever add to it.
TIMES = """
import subprocess, sys, time
def seconds(source):
    start = time.perf_counter()
    subprocess.run([sys.executable, "-I", "-c", source], check=True)
    return time.perf_counter() - start
pairs = [(seconds("pass"), seconds("import dataloader_rs")) for _ in range(int(sys.argv[1]))]
print(min(empty for empty, _ in pairs), min(imported for _, imported in pairs))
"""


class Environment:
    """A virtual environment without an index and with an empty PATH, in which pip finds what is in `wheels`."""

    def __init__(self, folder: Path, wheels: Path) -> None:
        venv.create(folder / "venv", with_pip=True, symlinks=True)
        (folder / "nothing").mkdir()
        self.python = str(folder / "venv" / "bin" / "python")
        self.cwd = folder / "nothing"
        self.env = {"PATH": str(self.cwd), "HOME": str(self.cwd), "LANG": "C.UTF-8", "PIP_NO_INDEX": "1",
                    "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull,
                    "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

    def run(self, *arguments: str, **more_env: str) -> str:
        """Standard output of Python with these arguments; on failure the end of everything."""
        finished = subprocess.run([self.python, *arguments], cwd=self.cwd, env={**self.env, **more_env}, text=True,
                                  stdout=subprocess.PIPE)
        if finished.returncode:
            sys.exit(f"{finished.stdout}\npython {shlex.join(arguments)} ended with {finished.returncode}")
        return finished.stdout


def test_commands(name: str) -> tuple[list[str], list[str]]:
    """What cibuildwheel installs and runs to try a wheel of this name on Linux."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cibuildwheel"]
    commands = list(settings["test-command"])
    if name.split("-")[3].endswith("t"):
        (override,) = settings["overrides"]
        commands += override["test-command"]
    return settings["test-requires"], [command.replace("{project}", str(ROOT)) for command in commands]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--wheels", type=Path, required=True)
    parser.add_argument("--suite", action="store_true")
    options = parser.parse_args()
    wheel = options.wheel.resolve()
    with tempfile.TemporaryDirectory() as folder:
        environment = Environment(Path(folder), options.wheels.resolve())
        environment.run("-m", "pip", "install", "-q", str(wheel))
        version = environment.run("-I", "-W", "error", "-c", ABOUT).strip()
        if version != wheel.name.split("-")[1]:
            sys.exit(f"{wheel.name} says that its version is {version}")
        empty, imported = map(float, environment.run("-I", "-c", TIMES, str(ROUNDS)).split())
        print(f"{wheel.name}: {wheel.stat().st_size / 1000:.0f} kB; importing it takes "
              f"{1000 * (imported - empty):.1f} ms more than the {1000 * empty:.1f} ms of an empty Python")
        environment.run("-m", "pip", "install", "-q", "numpy")
        print(environment.run(str(ROOT / "tools" / "examples.py")), end="")
        if options.suite:
            requires, commands = test_commands(wheel.name)
            environment.run("-m", "pip", "install", "-q", *requires)
            path = os.pathsep.join([str(Path(environment.python).parent), os.environ["PATH"]])
            for command in commands:
                print(f"\n{command}", flush=True)
                finished = subprocess.run(shlex.split(command), cwd=environment.cwd,
                                          env={**environment.env, "PATH": path})
                if finished.returncode:
                    sys.exit(finished.returncode)


if __name__ == "__main__":
    main()
