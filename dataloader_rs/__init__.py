"""A DataLoader whose workers are C threads.

The files, in the order of the data: ``dataset.py`` (what a dataset answers), ``sampler.py`` (the order of the user's
indices), ``_shuffle.pyx`` and ``_order.c`` (the order of a shuffle), ``loader.py`` (the loader and its epochs) with
``arguments.py`` (checks), ``pools.py`` (when threads start), ``_reorder.c`` (the ring of slots) and ``_pool.c`` (the
threads that fill it), ``_core.pyx`` with ``_bridge.h`` and ``_freethreading.h`` (the bridge between the two and Python,
and the iterator), ``threads.py`` (what makes a worker look like a Python thread), ``fetch.py`` (how items are asked
for), ``collate.py`` (how samples become a batch of arrays) with ``_buffers.pyx``, ``_copy.h`` and ``_store.c`` (memory
that batches use again), ``pinning.py`` (how a batch gets into page-locked memory), ``errors.py`` (how an exception of
user code comes out), ``sharing.py`` with ``_share.pyx`` (lookup tables that all threads read).
"""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _version

from dataloader_rs._core import PyDataloaderIter
from dataloader_rs.collate import default_collate, register_collate
from dataloader_rs.dataset import PyDataset, PyDatasetBase
from dataloader_rs.loader import PyDataloader
from dataloader_rs.sharing import share

__all__ = [
    "PyDataloader", "PyDataloaderIter", "PyDataset", "PyDatasetBase", "default_collate", "register_collate", "share",
]


def __getattr__(name: str) -> str:
    # Reading the metadata takes milliseconds, which an import should not.
    if name == "__version__":
        try:
            return _version("dataloader-rs")
        except PackageNotFoundError:
            return "unknown"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
