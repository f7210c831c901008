"""Train a small classifier on 1,797 PNG files, with the loading done by PyDataloader's worker threads.

Reading, decoding, augmenting and stacking happen in `DigitImages` and `collate`, on the workers. The model is
plain NumPy and lives in the main thread, where a real training loop has its GPU.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
from common import check, handwritten_digits, has_gil, interpreter, items_per_second, usable_cores
from PIL import Image
from tqdm import tqdm

from dataloader_rs import PyDataloader, PyDataset

Sample = tuple[np.ndarray, int]
Batch = tuple[np.ndarray, np.ndarray]
Loader = PyDataloader[Sample, Batch]


def cached_images(folder: Path) -> list[Path]:
    """Paths of the digits, written to `folder` the first time.

    The files are complete under their final name or not there at all, also when two processes start together.
    """
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            written = Path(scratch) / folder.name
            write_images(written)
            try:
                written.rename(folder)
            except OSError:  # fine if another process was first
                if not folder.is_dir():
                    raise
    return sorted(folder.glob("*.png"))


def write_images(folder: Path) -> None:
    """Write scikit-learn's digits as `<number>-<digit>.png` files, 8 x 8 pixels of 8 bits each."""
    folder.mkdir()
    digits = handwritten_digits()
    for number, (image, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        pixels = np.round(image * (255 / 16)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:04}-{digit}.png")


class DigitImages(PyDataset[Sample]):
    """Image files as (pixels between 0 and 1 of shape (8, 8), digit) pairs.

    Thread safety: workers call `__getitem__` on several threads at once, so it only reads. What is random
    about an item comes from a generator of its own, made from seed, epoch and index: no thread waits for
    another, and the result does not depend on which came first. `epoch` may be set while nothing is loaded.
    """

    def __init__(self, paths: list[Path], augmented: bool, seed: int = 0) -> None:
        super().__init__()
        self.paths = paths
        self.digits = [int(path.stem.rpartition("-")[2]) for path in paths]
        self.augmented = augmented
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Sample:
        with Image.open(self.paths[index]) as image:
            pixels = np.asarray(image, dtype=np.float32) / 255
        if self.augmented:
            pixels = augment(pixels, np.random.default_rng((self.seed, self.epoch, index)))
        return pixels, self.digits[index]


def augment(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """`pixels` moved sideways by up to one pixel, with noise on top."""
    width = pixels.shape[1]
    framed = np.pad(pixels, ((0, 0), (1, 1)))
    left = rng.integers(0, 3)
    noise = rng.standard_normal(pixels.shape, dtype=pixels.dtype)
    return framed[:, left : left + width] + 0.05 * noise


def collate(samples: list[Sample]) -> Batch:
    """One array of flattened images, shape (batch, 64), and one of digits, shape (batch,)."""
    pixels, digits = zip(*samples, strict=True)
    return np.stack(pixels).reshape(len(samples), -1), np.array(digits)


class Classifier:
    """A network with one hidden layer, trained by gradient descent with momentum."""

    def __init__(self, inputs: int, hidden: int, classes: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.weights = [
            rng.normal(0, (2 / fan_in) ** 0.5, size=(fan_in, fan_out)).astype(np.float32)
            for fan_in, fan_out in ((inputs, hidden), (hidden, classes))
        ]
        self.biases = [np.zeros(size, dtype=np.float32) for size in (hidden, classes)]
        self.velocities = [np.zeros_like(values) for values in self.weights + self.biases]

    def forward(self, pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Activations of the hidden layer, and the logits."""
        hidden = np.maximum(pixels @ self.weights[0] + self.biases[0], 0)
        return hidden, hidden @ self.weights[1] + self.biases[1]

    def step(self, pixels: np.ndarray, digits: np.ndarray, rate: float, momentum: float = 0.9) -> float:
        """Learn from one batch; the mean cross-entropy before the step."""
        hidden, logits = self.forward(pixels)
        chances = np.exp(logits - logits.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        rows = np.arange(len(digits))
        loss = -np.log(chances[rows, digits] + 1e-9).mean()

        chances[rows, digits] -= 1
        of_logits = chances / len(digits)
        of_hidden = of_logits @ self.weights[1].T * (hidden > 0)
        gradients = [pixels.T @ of_hidden, hidden.T @ of_logits, of_hidden.sum(axis=0), of_logits.sum(axis=0)]
        parameters = self.weights + self.biases
        for values, velocity, gradient in zip(parameters, self.velocities, gradients, strict=True):
            velocity *= momentum
            velocity -= rate * gradient
            values += velocity
        return float(loss)


def train(model: Classifier, loader: Loader, epochs: int) -> None:
    """Train for some epochs; the learning rate falls to zero along half a cosine."""
    with tqdm(total=epochs * len(loader), unit="batch", desc="training", mininterval=0.5, disable=None) as progress:
        for epoch in range(epochs):
            loader.dataset.epoch = epoch
            rate = 0.1 * (1 + np.cos(np.pi * epoch / epochs))
            for pixels, digits in loader:
                loss = model.step(pixels, digits, rate)
                progress.set_postfix(epoch=epoch + 1, loss=f"{loss:.3f}", refresh=False)
                progress.update()


def accuracy(model: Classifier, loader: Loader) -> float:
    """Share of images that the model names correctly."""
    right = sum(int((model.forward(pixels)[1].argmax(axis=1) == digits).sum()) for pixels, digits in loader)
    return right / len(loader.dataset)


def cache_folder() -> Path:
    """Where the image files are kept, by the XDG convention."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dataloader-rs" / "digits"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=usable_cores(), help="threads that load (%(default)s)")
    parser.add_argument("--epochs", type=int, default=10, help="times to go over the images (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="images in a batch (%(default)s)")
    parser.add_argument("--images", type=Path, default=cache_folder(), help="where they are (%(default)s)")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    paths = cached_images(options.images)
    held_out = paths[::5]
    training = sorted(set(paths) - set(held_out))
    print(f"{interpreter()}, {options.workers} workers")
    print(f"{len(paths)} images in {options.images}: {len(training)} to train on, {len(held_out)} held out")

    def loader(dataset: DigitImages, num_workers: int) -> Loader:
        return PyDataloader(
            dataset,
            batch_size=options.batch_size,
            shuffle=True,
            seed=0,
            num_workers=num_workers,
            collate_fn=collate,
        )

    augmented = DigitImages(training, augmented=True)
    model = Classifier(inputs=64, hidden=64, classes=10)
    train(model, loader(augmented, options.workers), options.epochs)
    right = accuracy(model, loader(DigitImages(held_out, augmented=False), options.workers))
    alone, together = items_per_second([loader(augmented, 0), loader(augmented, options.workers)])

    print(f"accuracy on held-out images: {right:.1%}")
    print(f"images per second: {alone} without workers, {together} with {options.workers} ({together.against(alone)})")
    if has_gil():
        print("(images this small are Python work above all, and the GIL lets one thread at a time do that)")
    check(right > 0.93, "an accuracy above 93 %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
