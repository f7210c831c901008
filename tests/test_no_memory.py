"""Allocations of Python that fail one after the other: a MemoryError or the right batch, and nothing worse.

``_testcapi.set_nomemory(n, n + 2)`` refuses two allocations of the process, whichever thread asks for them.
"""

from __future__ import annotations

import importlib.util

import pytest
from reference import drained
from toy_datasets import Ids

from dataloader_rs import PyDataloader
from dataloader_rs.worker_info import Crew

pytestmark = pytest.mark.slow

SCRIPT = """
    import sys
    import _testcapi
    from dataloader_rs import PyDataloader, PyDataset
    from toy_datasets import Ids

    class Many(Ids):
        def __getitems__(self, indices):
            return indices

    def refuse_each(arguments, dataset, expected):
        errors = 0
        for refused in range(int(sys.argv[1]), 160, 4):
            # The first next() waits for all workers to have started: CPython 3.11 itself crashes where it has no memory
            # for the state of a new thread.
            loader = PyDataloader(dataset, worker_init_fn=lambda worker: None, **arguments)
            assert next(iter(loader)) == expected[0]
            batches, taken, failed = iter(loader), [], 0
            _testcapi.set_nomemory(refused, refused + 2)
            while True:
                try:
                    taken.append(next(batches))
                except StopIteration:
                    break
                except MemoryError:
                    failed += 1
                finally:
                    _testcapi.remove_mem_hooks()
            errors += failed
            assert failed or taken == expected, taken
            assert all(batch in expected for batch in taken), taken
            # An error of a sampler ends the epoch; any other costs one batch.
            assert "batch_sampler" in arguments or len(taken) + failed >= len(expected), (taken, failed)
            assert list(PyDataloader(Ids(2), num_workers=1)) == [[0], [1]]
        return errors

    pairs, own = [[0, 1], [2, 3]], [[0], [1, 2], [3]]
    errors = 0
    for workers in range(3):
        errors += refuse_each(dict(batch_size=2, num_workers=workers), Ids(4), pairs)
        errors += refuse_each(dict(batch_size=2, num_workers=workers), Many(4), pairs)
        errors += refuse_each(dict(batch_size=2, num_workers=workers, collate_fn=lambda samples: list(samples)), Ids(4),
                              pairs)
        errors += refuse_each(dict(batch_sampler=own, num_workers=workers), Ids(4), own)
    errors += refuse_each(dict(batch_size=2, num_workers=1, items_in_parallel=2), Ids(4), pairs)
    assert errors > (8 if sys.version_info >= (3, 14) else 20), errors
    print("the end")
"""


@pytest.mark.skipif(importlib.util.find_spec("_testcapi") is None,
                    reason="this interpreter was built without _testcapi")
@pytest.mark.parametrize("first", range(4))
def test_refused_allocations_cost_batches_and_no_more(first, run_script):
    """At whatever allocation of an epoch: the batch is right or a MemoryError, and the next loader works."""
    # What Python prints of errors where nobody can catch them is its own affair.
    finished = run_script(SCRIPT, str(first), stderr=None, timeout=50)
    assert finished.stdout == "the end\n", finished.stderr


@pytest.mark.parametrize("arguments", [{}, {"items_in_parallel": 2}, {"in_order": False}, {"across_epochs": True}])
def test_workers_that_find_no_memory_to_start_end_the_epoch(arguments, monkeypatch):
    """One MemoryError and then the end, however often it is asked; the next epoch has new workers and all batches."""
    def fails(self, worker: int) -> bool:
        raise MemoryError

    loader = PyDataloader(Ids(8), batch_size=2, num_workers=2, **arguments)
    monkeypatch.setattr(Crew, "start", fails)
    batches = iter(loader)
    (error,) = drained(batches)
    assert type(error) is MemoryError and "no memory for a worker to start" in str(error)
    assert drained(batches) == [] and len(batches) == 0
    monkeypatch.undo()
    assert sorted(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]
