"""A DataLoader whose workers are C threads.

The files, in the order of the data: ``dataset.py`` (what a dataset answers), ``stream.py`` (datasets that are
iterated), ``sampler.py`` (the order of the user's indices), ``_shuffle.pyx`` and ``_order.c`` (the order of a shuffle),
``loader.py`` (the loader and its epochs) with ``arguments.py`` (checks), ``pools.py`` (when threads start),
``_reorder.c`` (the ring of slots), ``_pool.c`` with ``_worker.c`` and ``_claim.c`` (the threads that fill it) and
``_epoch.c`` (who takes from it), ``_core.pyx`` (whose parts are ``.pxi`` files) with ``_bridge.h``, ``_fork.h`` and
``_freethreading.h`` (the bridge between all that and Python, and the iterator), ``threads.py`` (what makes a worker
look like a Python thread), ``worker_info.py`` (what a worker knows of itself, and what it calls when it starts and
ends), ``fetch.py`` (how items are asked for), ``randomness.py`` with ``sample_seed.py`` (random numbers of a sample),
``collate.py`` (how samples become a batch of arrays) with ``_buffers.pyx``, ``_copy.h`` and ``_store.c`` (memory that
batches use again), ``pinning.py`` (how a batch gets into page-locked memory) and ``containers.py`` (containers like
others), ``errors.py`` (how an exception of user code comes out), ``epochs.py`` and ``generators.py`` (what the order of
an epoch depends on), ``ahead.py`` (the epoch that workers go on with), ``serial.py`` with ``locks.py`` (one thread at a
time in a dataset), ``torch_arguments.py`` and ``foreign.py`` (what comes from torch as it is), ``stuck.py`` (what a
batch that does not come waits for), ``sharing.py`` with ``_share.pyx`` (lookup tables that all threads read),
``interpreters.py`` (which interpreters may import all this), ``hints.py`` (what annotations are made of) and
``protocols.py`` (what type checkers know of datasets that are not ours).
"""

from dataloader_rs.interpreters import require_main_interpreter

require_main_interpreter()  # before the extension modules, see there

from dataloader_rs._core import PyDataloaderIter
from dataloader_rs.dataset import PyDataset, PyDatasetBase
from dataloader_rs.errors import BatchTimeoutError
from dataloader_rs.hints import TYPE_CHECKING
from dataloader_rs.loader import PyDataloader
from dataloader_rs.randomness import sample_rng
from dataloader_rs.stream import PyIterableDataset
from dataloader_rs.worker_info import WorkerInfo, get_worker_info

__all__ = [
    "BatchTimeoutError", "PyDataloader", "PyDataloaderIter", "PyDataset", "PyDatasetBase", "PyIterableDataset",
    "WorkerInfo", "default_collate", "get_worker_info", "register_collate", "sample_rng", "share",
]


# What an import would take longer for, and not all programs need, comes when it is first asked for.
if TYPE_CHECKING:
    from dataloader_rs.collate import default_collate, register_collate
    from dataloader_rs.sharing import share

    __version__: str
else:
    _HOMES = {"default_collate": "collate", "register_collate": "collate", "share": "sharing"}
    _LATE = {"collate", "containers", "pinning", "sharing"}

    def __getattr__(name):
        if name == "__version__":
            return _version()
        if name not in _HOMES and name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        home = importlib.import_module(f"dataloader_rs.{_HOMES.get(name, name)}")
        return globals().setdefault(name, home if name in _LATE else getattr(home, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("dataloader-rs")
    except PackageNotFoundError:
        return "unknown"
