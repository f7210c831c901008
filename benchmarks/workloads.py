"""The datasets that every contender loads: plain classes that know no loader.

Each is made as ``Dataset(length, folder)``. `length` is free, because items repeat with a period; `folder` is where
datasets of files find theirs, or write them the first time.
"""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

try:
    from PIL import Image
except ImportError:  # only the workload that needs it does without
    Image = None

WORDS = 20_000
WORDS_IN_A_TEXT = 250


class Ids:
    """The emptiest dataset: what it costs is the loader's."""

    def __init__(self, length: int, folder: Path) -> None:
        super().__init__()
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> object:
        return index


class FreshObjects(Ids):
    """A new tuple of three new objects: what crosses threads has a reference count of its own."""

    def __getitem__(self, index: int) -> object:
        return (index + 1_000_000, float(index), str(index))


class ArrayFiles(Ids):
    """Files of 192 KB that `numpy.load` reads."""

    num_files = 64

    def __init__(self, length: int, folder: Path) -> None:
        super().__init__(length, folder)
        self.paths = written(folder / "arrays", self.num_files, ".npy", self.write)

    @staticmethod
    def write(path: Path, number: int) -> None:
        np.save(path, np.random.default_rng(number).random((3, 128, 128), dtype=np.float32))

    def __getitem__(self, index: int) -> object:
        return np.load(self.paths[index % self.num_files])


class ImageFiles(Ids):
    """JPEG files of 256 x 256 pixels that Pillow decodes."""

    num_files = 32

    def __init__(self, length: int, folder: Path) -> None:
        if Image is None:
            raise ModuleNotFoundError("Pillow is not installed")
        super().__init__(length, folder)
        self.paths = written(folder / "images", self.num_files, ".jpg", self.write)

    @staticmethod
    def write(path: Path, number: int) -> None:
        # Smooth enough that the file has the size of a photograph's.
        coarse = np.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((256, 256), Image.Resampling.BICUBIC).save(path, quality=90)

    def __getitem__(self, index: int) -> object:
        with Image.open(self.paths[index % self.num_files]) as image:
            return np.asarray(image.convert("RGB"))


class Augmentation(Ids):
    """A crop of an image in memory, flipped or not, with its contrast stretched, as normalised float32."""

    num_images = 16
    size = 256
    crop = 224

    def __init__(self, length: int, folder: Path) -> None:
        super().__init__(length, folder)
        shape = (self.num_images, self.size, self.size, 3)
        self.images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        self.mean = np.array([0.485, 0.456, 0.406], dtype=np.float32)
        self.deviation = np.array([0.229, 0.224, 0.225], dtype=np.float32)

    def __getitem__(self, index: int) -> object:
        # Random by index, so that all contenders make the same sample.
        mixed = index * 2_654_435_761 & 0xFFFF_FFFF
        top, left = mixed % (self.size - self.crop), (mixed >> 8) % (self.size - self.crop)
        image = self.images[index % self.num_images, top:top + self.crop, left:left + self.crop]
        if mixed >> 31:
            image = image[:, ::-1]
        pixels = image.astype(np.float32)
        pixels *= np.float32(1 / 255)
        contrast = np.float32(0.8 + (mixed >> 16 & 0xFF) / 640)
        pixels = np.clip((pixels - pixels.mean()) * contrast + pixels.mean(), 0, 1)
        return (pixels - self.mean) / self.deviation


class Tokens(Ids):
    """Texts of 250 words as lists of numbers, by pure Python and one dict of 20,000 words that all threads read."""

    num_texts = 32

    def __init__(self, length: int, folder: Path) -> None:
        super().__init__(length, folder)
        choose = random.Random(0).randrange
        self.texts = [" ".join(f"word{choose(WORDS)}" for _ in range(WORDS_IN_A_TEXT)) for _ in range(self.num_texts)]
        self.vocabulary = new_vocabulary()

    def __getitem__(self, index: int) -> object:
        # Not by `dict.get`, which on 3.13t locks the dict twice, and parks the thread over it, for values that another
        # thread made: 30 us a word, of which no loader can say anything.
        vocabulary = self.vocabulary
        return [vocabulary[word] for word in self.texts[index % self.num_texts].split()]


class TokensByThread(Tokens):
    """The same with a dict for each thread, whose words and numbers no other thread touches."""

    def __init__(self, length: int, folder: Path) -> None:
        super().__init__(length, folder)
        del self.vocabulary
        self.local = threading.local()

    def __getitem__(self, index: int) -> object:
        try:
            vocabulary = self.local.vocabulary
        except AttributeError:
            vocabulary = self.local.vocabulary = new_vocabulary()
        return [vocabulary[word] for word in self.texts[index % self.num_texts].split()]

    def __getstate__(self) -> dict[str, object]:
        """All but the threads' own dicts, for loaders whose workers are processes."""
        return {name: value for name, value in vars(self).items() if name != "local"}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state, local=threading.local())


class Network(Ids):
    """Items that wait 5 ms, as a request does."""

    seconds_per_item = 0.005

    def __getitem__(self, index: int) -> object:
        time.sleep(self.seconds_per_item)
        return index


class Table(Ids):
    """Rows of an array, of which `__getitems__` reads a whole batch at once."""

    def __init__(self, length: int, folder: Path) -> None:
        super().__init__(length, folder)
        self.table = np.random.default_rng(0).random((10_000, 64), dtype=np.float32)

    def __getitem__(self, index: int) -> object:
        return self.table[index % len(self.table)]

    def __getitems__(self, indices: list[int]) -> list:
        return list(self.table[np.asarray(indices) % len(self.table)])


class Rows(Ids):
    """New arrays of 16 KB: what a loader keeps of them shows in the memory of the process."""

    def __getitem__(self, index: int) -> object:
        return np.full(4096, index, dtype=np.float32)


class PurePython(Ids):
    """About 200 us of pure Python, during which the thread holds the GIL if there is one."""

    def __getitem__(self, index: int) -> object:
        return turns(4_000)


def turns(count: int) -> int:
    """Pure Python for about 50 ns a turn. Counted, not timed: time would also pass while other threads run."""
    total = 0
    for number in range(count):
        total = (total * 31 + number) & 0xFFFF
    return total


def new_vocabulary() -> dict[str, int]:
    """Words and numbers that no other vocabulary shares."""
    return {f"word{number}": number for number in range(WORDS)}


def stacked(samples: list) -> object:
    """One array of a batch of arrays."""
    return np.stack(samples)


def stamped(samples: list) -> float:
    """When the batch was complete, on a clock that all processes of the machine share."""
    return time.perf_counter()


def written(folder: Path, count: int, suffix: str, write: Callable[[Path, int], None]) -> list[str]:
    """Paths of `count` files in `folder`, complete or not there at all, also if a process dies that writes them."""
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            for number in range(count):
                write(Path(scratch) / f"{number:03}{suffix}", number)
            os.rename(scratch, folder)
            os.mkdir(scratch)  # for TemporaryDirectory to remove
    return sorted(str(path) for path in folder.iterdir())
