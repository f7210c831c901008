"""Runs the examples of the README with the dataloader_rs that is installed. Knows nothing of wheels.

    python tools/examples.py

They run as in the test suite (tests/documentation.py), in a process of their own, from an empty folder and with
warnings as errors, so that what they import is what is installed and not what lies in the checkout.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from documentation import README, program_of


def main() -> None:
    program, printed = program_of(README, "python")
    with tempfile.TemporaryDirectory() as empty:
        finished = subprocess.run([sys.executable, "-I", "-W", "error", "-c", program], cwd=empty, timeout=120,
                                  capture_output=True, text=True)
    if finished.returncode or finished.stderr or finished.stdout.splitlines() != printed:
        sys.exit(f"{finished.stdout}{finished.stderr}\nThe examples of the README should have printed:\n"
                 + "\n".join(printed))
    print(f"the {sum(line.startswith('block ') for line in printed)} examples of the README print what they say")


if __name__ == "__main__":
    main()
