"""Load windows of one large array that lies in a file, through a memory map.

The map is opened once, and all threads read it: there is no position to seek, so they do not get in each other's way,
and the system keeps what was read in its cache for all processes. An item is a window of bytes of text, and the same
window one byte on, which is what a language model of bytes learns from. Items are views: the file is read when
`default_collate` copies them side by side, on the worker. For batches of 256 KiB and more that needs no GIL.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
from common import check, interpreter, items_per_second, standard_library

from dataloader_rs import PyDataloader, PyDataset, default_collate

Sample = tuple[np.ndarray, np.ndarray]


def write_corpus(path: Path) -> None:
    """All text of the standard library's modules as one array of bytes, in a .npy file."""
    text = b"".join(source.read_bytes() for source in standard_library())
    np.save(path, np.frombuffer(text, dtype=np.uint8))


class Windows(PyDataset[Sample]):
    """Windows of `size` bytes, each with the bytes that follow; they do not overlap, and a rest is left out.

    Thread safety: the map is for reading only, and nothing else changes.
    """

    def __init__(self, path: Path, size: int) -> None:
        super().__init__()
        self.corpus: np.ndarray = np.load(path, mmap_mode="r")
        self.size = size

    def __len__(self) -> int:
        return (len(self.corpus) - 1) // self.size

    def __getitem__(self, index: int) -> Sample:
        first = index * self.size
        # As plain arrays: what NumPy does for a memmap at every slice costs more than the slice.
        window = np.asarray(self.corpus)[first : first + self.size + 1]
        return window[:-1], window[1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2, help="threads that load (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="windows in a batch (%(default)s)")
    parser.add_argument("--size", type=int, default=4096, help="bytes in a window (%(default)s)")
    options = parser.parse_args()
    print(interpreter())

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.npy"
        write_corpus(path)
        windows = Windows(path, options.size)

        def loader(num_workers: int) -> PyDataloader[Sample, Sample]:
            return PyDataloader(
                windows,
                batch_size=options.batch_size,
                shuffle=True,
                seed=0,
                num_workers=num_workers,
                collate_fn=default_collate,
            )

        # How often each byte occurs does not depend on the order of the windows.
        counts = np.zeros(256, dtype=np.int64)
        right = 0
        for here, following in loader(options.workers):
            counts += np.bincount(here.reshape(-1), minlength=256)
            right += int((here[:, 1:] == following[:, :-1]).sum())
        used = np.load(path)[: len(windows) * options.size]
        check(bool((counts == np.bincount(used, minlength=256)).all()), "an epoch is each byte once")
        check(right == len(windows) * (options.size - 1), "what follows is one byte on")
        print(f"{len(windows):,} windows of {options.size} bytes, {path.stat().st_size:,} bytes in the file")

        alone, together = items_per_second([loader(0), loader(options.workers)])
    print(f"windows per second without workers: {alone}")
    print(f"with {options.workers} workers: {together} ({together.against(alone)})")
    print("(the file is in the system's cache, so that there is nothing to wait for)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
