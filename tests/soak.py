"""Loads in full, and a soak: for minutes or hours, random loaders with random errors, breaks and garbage collections.

    python tests/soak.py load
    python tests/soak.py soak [--minutes 30] [--seed N] [--plant leak|thread|descriptor|loss]

A soak prints one line a minute, and a summary. It fails if a batch is lost or is not what it must be, or if memory,
threads or descriptors grow. They are measured in quiet moments, when all that was made has been dropped: threads and
descriptors must then be exactly as many as at first, and of the others no more in the last third of the time than in
the middle third. `--plant` makes it do what it must notice.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import os
import platform
import random
import resource
import statistics
import sys
import threading
import time
import traceback
from pathlib import Path

from conftest import FREE_THREADED, eventually, worker_threads
from loads import many_batches, many_loaders, many_threads, many_workers
from rounds import Fault, Tally, run_rounds
from tasks import num_threads

from dataloader_rs.collate import release_buffers

NUM_DRIVERS = 3
HANG = 180.0  # seconds without a quiet moment after which all stacks are printed
MB = 1 << 20

# What may grow from the middle third to the last: by this share, or by so much if that is more. Of blocks some caches
# of the interpreter take a few hundred; of resident memory the C library keeps pieces, more or less by chance.
# CPython 3.13t keeps 27 blocks for three threads that were started and joined, as drivers are, also without a loader.
ALLOWED = {"blocks": (0.01, 4000 if FREE_THREADED and sys.version_info < (3, 14) else 1000), "resident": (0.05, 4 * MB)}


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) - 1  # without the one that lists them


def measure() -> dict[str, int]:
    """What the process holds in a quiet moment."""
    gc.collect()
    release_buffers()
    getattr(ctypes.CDLL(None), "malloc_trim", lambda size: None)(0)
    return {"resident": resident(), "threads": num_threads(), "descriptors": num_descriptors(),
            "blocks": sys.getallocatedblocks()}


def growth(samples: list[int], share: float, amount: int) -> str | None:
    """What is wrong with a series: the median of its last third is above that of its middle third by too much.

    Medians, since a single sample may be anything; and not the first third, in which caches fill.
    """
    third = len(samples) // 3
    if third == 0:
        return None
    middle, last = statistics.median(samples[-2 * third:-third]), statistics.median(samples[-third:])
    if last - middle <= max(share * middle, amount):
        return None
    return f"grows: {middle:.0f} in the middle third of the time, {last:.0f} in the last"


def quiet() -> bool:
    """Wait until all that was dropped has ended. Collecting is the costly part, and workers drop things as they end."""
    return any(gc.collect() >= 0 and eventually(lambda: not worker_threads(), patience) for patience in (1, 10, 30))


def soak(minutes: float, seed: int, plant: str | None) -> list[str]:
    """Run it, print how it goes, and return what is wrong."""
    tally = Tally()
    rngs = [random.Random(f"{seed} {number}") for number in range(NUM_DRIVERS)]
    planted: list = []
    faults: list[str] = []
    series: list[dict[str, int]] = []
    slice_seconds = min(max(1.0, minutes * 60 / 90), 20.0)
    start = time.monotonic()
    deadline, minute = start + minutes * 60, 1

    def drive(rng: random.Random, until: float) -> None:
        try:
            run_rounds(rng, tally, lambda: bool(faults) or time.monotonic() > until,
                       planted if plant == "leak" else None)
        except BaseException:
            faults.append(traceback.format_exc())

    def line() -> str:
        now = series[-1]
        return (f"epochs {tally.epochs}, batches {tally.batches}, errors {tally.errors}, breaks {tally.breaks}, "
                f"loaders {tally.loaders}; resident {now['resident'] / MB:.1f} MB, blocks {now['blocks']}, "
                f"threads {now['threads']}, descriptors {now['descriptors']}")

    print(f"CPython {platform.python_version()}{sys.abiflags}, seed {seed}, {minutes:g} minutes", flush=True)
    faulthandler.dump_traceback_later(HANG, exit=True)  # it has a thread
    first = measure()
    while time.monotonic() < deadline and not faults:
        faulthandler.dump_traceback_later(HANG, exit=True)
        until = min(time.monotonic() + slice_seconds, deadline)
        drivers = [threading.Thread(target=drive, args=(rng, until)) for rng in rngs]
        for driver in drivers:
            driver.start()
        for driver in drivers:
            driver.join()
        del drivers, driver
        if plant == "thread":
            planted.append(threading.Event())
            threading.Thread(target=planted[-1].wait, args=(HANG,), daemon=True).start()
        if plant == "descriptor":
            planted.append(open(os.devnull, "rb"))  # noqa: SIM115
        if plant == "loss":
            tally.add(lost=1)
        if not quiet():
            faults.append(f"workers are left in a quiet moment: {worker_threads()}")
        # A thread that was joined may not have ended quite yet.
        eventually(lambda: num_threads() == first["threads"], 1.0 if plant else 10.0)
        series.append(measure())
        for name in ("threads", "descriptors"):
            if series[-1][name] != first[name]:
                faults.append(f"{name}: {series[-1][name]} in a quiet moment, {first[name]} at first")
        if tally.workers_started != tally.workers_ended:
            faults.append(f"worker_init_fn returned on {tally.workers_started} workers, and worker_exit_fn was called "
                          f"on {tally.workers_ended}")
        if tally.lost and not faults:
            faults.append("a batch was lost")
        if time.monotonic() - start >= 60 * minute:
            print(f"minute {minute}: {line()}", flush=True)
            minute += 1
    faulthandler.cancel_dump_traceback_later()
    for name, allowed in ALLOWED.items():
        text = growth([sample[name] for sample in series], *allowed)
        if text is not None:
            faults.append(f"{name} {text}: {[sample[name] for sample in series]}")
    print(f"summary: {line()}; {tally.samples} samples with checksum {tally.checksum}, "
          f"{tally.workers_started} workers, collections {tally.collections}, lost: {tally.lost}", flush=True)
    return faults


def load() -> list[str]:
    """All loads in full; memory, threads and descriptors are then what they were before the last."""
    print(f"CPython {platform.python_version()}{sys.abiflags}", flush=True)
    for run in (lambda: many_workers(256), lambda: many_loaders(64, 2000), lambda: many_batches(1_000_000, 4),
                lambda: many_threads(8, 120)):
        before, start = measure(), time.monotonic()
        faulthandler.dump_traceback_later(2 * HANG + 120, exit=True)
        try:
            text = run()
        except Fault as fault:
            return [str(fault)]
        finally:
            faulthandler.cancel_dump_traceback_later()
        if not quiet():
            return [f"workers are left: {worker_threads()}"]
        eventually(lambda before=before: num_threads() == before["threads"])
        after = measure()
        print(f"{text}; {time.monotonic() - start:.0f} s, resident {before['resident'] / MB:.1f} -> "
              f"{after['resident'] / MB:.1f} MB, blocks {before['blocks']} -> {after['blocks']}", flush=True)
        if (after["threads"], after["descriptors"]) != (before["threads"], before["descriptors"]):
            return [f"threads or descriptors are left: {after}, before it was {before}"]
    return []


def main() -> None:
    parser = argparse.ArgumentParser(description="Load the loader, or soak it.")
    parser.add_argument("what", choices=["load", "soak"])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--plant", choices=["leak", "thread", "descriptor", "loss"])
    arguments = parser.parse_args()
    gc.collect()
    gc.freeze()  # what was imported: a collection is ten times quicker without
    seed = int.from_bytes(os.urandom(4)) if arguments.seed is None else arguments.seed
    faults = load() if arguments.what == "load" else soak(arguments.minutes, seed, arguments.plant)
    for fault in faults:
        print(f"FAULT {fault}", file=sys.stderr, flush=True)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
