"""Train a network of torch, with batches that worker threads make.

`collate_fn="torch"` is torch's own collation, so that batches are tensors, made on the workers and handed over without
a copy; `pin_memory` copies them to page-locked memory where there is a GPU. Augmentation draws from `sample_rng()`, so
a run with the same seeds learns the same with any number of workers, which is what this example shows in the end.
"""

# pyright: reportUnknownParameterType=false
# The checkers of this project do without torch, which is large, so its types are unknown to them.

import argparse
import sys

import numpy as np
import torch
from common import check, handwritten_digits, interpreter, items_per_second, usable_cores

from dataloader_rs import PyDataloader, PyDataset, sample_rng

Sample = tuple[np.ndarray, int]


class Digits(PyDataset[Sample]):
    """scikit-learn's images of digits, of shape (1, 8, 8) and between 0 and 1, with the digit.

    Thread safety: it only reads.
    """

    def __init__(self, held_out: bool, augmented: bool) -> None:
        super().__init__()
        digits = handwritten_digits()
        chosen = (np.arange(len(digits.target)) % 5 == 0) == held_out
        self.images = (digits.images[chosen] / 16).astype(np.float32)[:, np.newaxis]
        self.digits: list[int] = digits.target[chosen].tolist()
        self.augmented = augmented

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> Sample:
        image = self.images[index]
        if self.augmented:
            rng = sample_rng()
            moved = np.roll(image, rng.integers(-1, 2), axis=2)
            image = moved + 0.05 * rng.standard_normal(image.shape, dtype=np.float32)
        return image, self.digits[index]


def new_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, kernel_size=3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(256, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 10),
    )


def loader_of(dataset: Digits, num_workers: int) -> PyDataloader[Sample, list[torch.Tensor]]:
    return PyDataloader(
        dataset,
        batch_size=32,
        shuffle=True,
        seed=0,
        num_workers=num_workers,
        collate_fn="torch",
        pin_memory=torch.cuda.is_available(),
    )


def train(dataset: Digits, num_workers: int, epochs: int, device: torch.device) -> torch.nn.Module:
    model = new_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with loader_of(dataset, num_workers) as loader:
        for epoch in range(epochs):
            losses = []
            for images, digits in loader:
                optimizer.zero_grad()
                # Not blocking: from page-locked memory the copy goes on while the GPU computes.
                logits = model(images.to(device, non_blocking=True))
                loss = torch.nn.functional.cross_entropy(logits, digits.to(device, non_blocking=True))
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            print(f"{num_workers} workers, epoch {epoch + 1}: mean loss {torch.stack(losses).mean().item():.4f}")
    return model


def accuracy(model: torch.nn.Module, dataset: Digits, device: torch.device) -> float:
    """Share of images that the model names correctly."""
    right = 0
    with torch.no_grad():
        for images, digits in loader_of(dataset, 0):
            right += int((model(images.to(device)).argmax(dim=1) == digits.to(device)).sum())
    return right / len(dataset)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=usable_cores(), help="threads that load (%(default)s)")
    parser.add_argument("--epochs", type=int, default=4, help="times to go over the images (%(default)s)")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)  # the workers are the parallel part
    print(f"{interpreter()}, torch {torch.__version__}, {device}")

    training = Digits(held_out=False, augmented=True)
    model = train(training, options.workers, options.epochs, device)
    alike = train(training, 0, options.epochs, device)
    right = accuracy(model, Digits(held_out=True, augmented=False), device)
    print(f"accuracy on held-out images: {right:.1%}")
    check(right > 0.93, "an accuracy above 93 %")
    if device.type == "cpu":  # the sums of a GPU may come in any order
        same = all(torch.equal(one, other) for one, other in zip(model.parameters(), alike.parameters(), strict=True))
        check(same, "with workers the model learns the same to the last bit")
        print("without workers the model learns the same to the last bit")

    alone, together = items_per_second([loader_of(training, 0), loader_of(training, options.workers)])
    print(f"images per second without workers: {alone}")
    print(f"with {options.workers} workers: {together} ({together.against(alone)})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
