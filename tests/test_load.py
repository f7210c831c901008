"""Many workers, loaders, batches and threads, in sizes that take a few seconds: `make load` has the full ones.

Also, that a soak sees what it is there to see.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("numpy")

from conftest import SLOWDOWN, child_environment
from loads import many_batches, many_loaders, many_threads, many_workers
from rounds import Fault, Outcome, Round, Tally, check_batch, record, run_rounds
from soak import growth

pytestmark = pytest.mark.slow

SOAK = Path(__file__).parent / "soak.py"


def test_256_workers_each_get_an_item():
    """A short epoch of 256 workers comes in order, and none of them is left out."""
    many_workers(256)


def test_64_loaders_at_once_lose_nothing():
    """Iterators of 64 loaders that take turns each give all samples, whole, and in as many batches as they should."""
    many_loaders(64, 50)


def test_50000_batches_through_one_loader_come_in_order():
    """Each batch is in its place, and their sum is right."""
    many_batches(50_000, 4)


def test_8_threads_make_half_iterate_and_drop_loaders():
    """Every batch is right, and no worker is left."""
    many_threads(8, 2)


def test_random_rounds_account_for_every_batch():
    """Random loaders with errors, breaks and collections give exactly what was worked out without a loader."""
    tally, end = Tally(), time.monotonic() + 2
    run_rounds(random.Random(1), tally, lambda: tally.epochs >= 20 and time.monotonic() > end)
    assert tally.batches > 100 and tally.lost == 0


# ---- the accounts themselves ----


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("found", [[(0, 1)], [(0, 1), (2, 3), (4, 5)], [(0, 1), (0, 1)], [(0, 1), (2, 4)]],
                         ids=["lost", "invented", "twice", "wrong"])
def test_account_notices(found, in_order):
    """A batch that is lost, invented, delivered twice, or made of other samples."""
    one = Round(random.Random(0), Tally())
    one.in_order = in_order
    expected = [Outcome((0, 1)), Outcome((2, 3))]
    with pytest.raises(Fault, match="must give"):
        one.account(expected, [Outcome(run) for run in found], False)
    assert one.tally.lost > 0
    one.account(expected, expected, False)
    one.account(expected, expected[:1], True)


def test_account_notices_order():
    """Batches that change places, unless they may."""
    one = Round(random.Random(0), Tally())
    expected = [Outcome((0, 1)), Outcome((2, 3))]
    one.in_order = False
    one.account(expected, expected[::-1], False)
    one.in_order = True
    with pytest.raises(Fault):
        one.account(expected, expected[::-1], False)


def test_check_notices_a_changed_byte():
    """A sample whose bytes are not those of its index."""
    index, payload, checksum = record(7)
    check_batch([(index, payload, checksum)], (7,))
    with pytest.raises(Fault):
        check_batch([(index, payload[:-1] + b"!", checksum)], (7,))


def test_growth_is_told_from_noise():
    """A series that rises by a little each time is growth; a rise at first, peaks and noise are not."""
    rng = random.Random(0)
    noise = [1000 + rng.randrange(-50, 50) for _ in range(90)]
    assert growth(noise, 0.01, 10) is None
    assert growth([*range(0, 900, 30), *noise[30:]], 0.01, 10) is None
    assert growth([value + 5000 * (place % 10 == 0) for place, value in enumerate(noise)], 0.01, 10) is None
    assert growth([value + 2 * place for place, value in enumerate(noise)], 0.01, 10) is not None
    assert growth([1, 2], 0, 0) is None


@pytest.mark.parametrize(("plant", "complaint"), [("thread", "threads: "), ("descriptor", "descriptors: "),
                                                  ("loss", "lost: 1")])
def test_soak_notices(plant, complaint):
    """A soak in which a thread or a descriptor is left, or a batch lost, fails and says so."""
    finished = subprocess.run([sys.executable, SOAK, "soak", "--minutes", "0.02", "--seed", "1", "--plant", plant],
                              capture_output=True, text=True, timeout=50 * SLOWDOWN, env=child_environment())
    assert finished.returncode == 1 and complaint in finished.stdout + finished.stderr, finished.stderr
