"""Runs the random programs of ``test_model.py`` until the time is up: ``python tests/fuzz.py MINUTES [SEED]``.

Each round has a seed of its own, which is printed before it starts, so that a process that dies or hangs leaves it
behind. The first failure ends the run, with its shortest program, the line that repeats it, and exit status 1.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
import warnings

PROGRAMS = 50


def main(minutes: float, seed: int) -> int:
    import test_model

    # As pytest is told to in pyproject.toml.
    warnings.simplefilter("error")
    gc.collect()
    gc.freeze()
    end = time.monotonic() + 60 * minutes
    num_rounds = 0
    while time.monotonic() < end or num_rounds == 0:
        print(f"\rround {num_rounds}, seed {seed}", end="", flush=True)
        try:
            test_model.run_programs(seed, PROGRAMS)
        except BaseException:
            print()
            traceback.print_exc()
            print(f"\nto repeat it: make fuzz MINUTES=0 SEED={seed}", file=sys.stderr)
            return 1
        num_rounds += 1
        seed += 1
    print(f"\n{PROGRAMS * num_rounds} programs, no failure")
    return 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2] if sys.argv[2:] else 0) or int.from_bytes(os.urandom(4))))
