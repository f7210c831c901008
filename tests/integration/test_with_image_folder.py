"""A folder of images by class, in the manner of torchvision, gives the batches that torch's loader makes of it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from same_batches import assert_same_epochs, every_size, library

from dataloader_rs import PyDataloader

torch = library("torch")
np = library("numpy")
Image = library("PIL", "Image").Image

from torch.utils.data import DataLoader, RandomSampler, default_collate  # noqa: E402

CLASSES = ["ant", "bee", "cat"]
SIZE = 12


class ImageFolder(torch.utils.data.Dataset):
    """Images below ``root/<class>/``: a sample is a tensor (3, SIZE, SIZE) of values in 0 .. 1, and a class number."""

    def __init__(self, root: Path) -> None:
        self.classes = sorted(folder.name for folder in root.iterdir())
        self.samples = [(path, label) for label, name in enumerate(self.classes)
                        for path in sorted((root / name).glob("*.png"))]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.samples[index]
        with Image.open(path) as image:
            pixels = np.array(image.convert("RGB").resize((SIZE, SIZE)))
        return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255, label


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> ImageFolder:
    """Three classes of nine PNGs: of several sizes, in grey, colour and with transparency."""
    root = tmp_path_factory.mktemp("images")
    source = random.Random(0)
    for name in CLASSES:
        (root / name).mkdir()
        for number in range(9):
            mode = ["L", "RGB", "RGBA"][number % 3]
            size = source.randrange(8, 20), source.randrange(8, 20)
            pixels = source.randbytes(size[0] * size[1] * len(mode))
            Image.frombytes(mode, size, pixels).save(root / name / f"{number}.png")
    return ImageFolder(root)


@every_size
@pytest.mark.parametrize("items_in_parallel", [1, 3])
def test_image_folder_gives_the_batches_of_torch(folder: ImageFolder, items_in_parallel: int, num_workers: int):
    """Decoded on several threads at once, images and labels are those that torch's loader gives, in its order."""
    assert folder.classes == CLASSES

    def order() -> RandomSampler:
        return RandomSampler(folder, generator=torch.Generator().manual_seed(2))

    ours = PyDataloader(folder, batch_size=4, sampler=order(), num_workers=num_workers,
                        items_in_parallel=items_in_parallel, collate_fn=default_collate)
    assert_same_epochs(ours, DataLoader(folder, batch_size=4, sampler=order()))


@every_size
def test_shuffled_image_folder_gives_each_image_once_an_epoch(folder: ImageFolder, num_workers: int):
    """With our own shuffle each epoch has every image once, under its label, in another order."""
    loader = PyDataloader(folder, batch_size=5, shuffle=True, seed=1, num_workers=num_workers,
                          collate_fn=default_collate)
    expected = sorted((image.sum().item(), label) for image, label in map(folder.__getitem__, range(len(folder))))
    epochs = []
    for _ in range(2):
        pairs = [pair for images, labels in loader
                 for pair in zip(images.sum((1, 2, 3)).tolist(), labels.tolist(), strict=True)]
        assert [label for _, label in sorted(pairs)] == [label for _, label in expected]
        assert [value for value, _ in sorted(pairs)] == pytest.approx([value for value, _ in expected])
        epochs.append(pairs)
    assert epochs[0] != epochs[1]
