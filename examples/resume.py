"""Take a training run up again that was killed in the middle of an epoch, and end with the very same numbers.

At the end of each epoch a checkpoint is stored: the model, the seed, and the number of the epoch to go on with.
`set_epoch` makes the loader go on with the orders and the random numbers of that epoch, so that only the work since the
checkpoint is done twice. Here the first run is a process that kills itself, as a machine that goes away does.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from common import check, interpreter, standard_library

from dataloader_rs import PyDataloader, PyDataset, default_collate, sample_rng

CROP = 65  # bytes of a file that make a sample


class Crops(PyDataset[np.ndarray]):
    """Bytes of the standard library's modules: of each file some, from another place in every epoch.

    Thread safety: it only reads. The place is drawn from `sample_rng()`, so it depends on the seed, the epoch and the
    position in it, and not on which worker is first.
    """

    def __init__(self) -> None:
        super().__init__()
        texts = [np.frombuffer(path.read_bytes(), dtype=np.uint8) for path in standard_library()]
        self.texts = [text for text in texts if len(text) >= CROP]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> np.ndarray:
        text = self.texts[index]
        first = sample_rng().integers(len(text) - CROP + 1)
        return text[first : first + CROP]


@dataclass
class State:
    """All that a run has to know to go on.

    The model says from one byte which may be next: `logits` has a row for each byte.
    """

    seed: int
    epoch: int = 0
    logits: np.ndarray = field(default_factory=lambda: np.zeros((256, 256)))
    losses: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def save(self, path: Path) -> None:
        """Store it. Whenever the process is killed, there is the old file or the new one, and both are whole."""
        written = path.with_suffix(".new")
        with written.open("wb") as file:
            np.savez(file, seed=self.seed, epoch=self.epoch, logits=self.logits, losses=self.losses)
            file.flush()
            os.fsync(file.fileno())
        written.replace(path)

    @classmethod
    def load(cls, path: Path) -> "State":
        with np.load(path) as stored:
            return cls(int(stored["seed"]), int(stored["epoch"]), stored["logits"], stored["losses"])


def step(logits: np.ndarray, crops: np.ndarray, rate: float) -> float:
    """Learn from one batch; the mean cross-entropy before the step."""
    here, following = crops[:, :-1].reshape(-1), crops[:, 1:].reshape(-1)
    chances = np.exp(logits[here] - logits[here].max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    rows = np.arange(len(here))
    loss = -np.log(chances[rows, following]).mean()
    chances[rows, following] -= 1
    np.subtract.at(logits, here, rate / len(here) * chances)
    return float(loss)


def train(checkpoint: Path, epochs: int, workers: int, killed_in: int | None = None) -> State:
    """Train up to so many epochs, from the checkpoint on if there is one. Epoch `killed_in` is not finished."""
    state = State.load(checkpoint) if checkpoint.exists() else State(seed=7)
    loader = PyDataloader(
        Crops(),
        batch_size=16,
        shuffle=True,
        seed=state.seed,  # also what sample_rng() is keyed by
        num_workers=workers,
        collate_fn=default_collate,
    )
    loader.set_epoch(state.epoch)  # every `for` after it is the next one
    with loader:
        for epoch in range(state.epoch, epochs):
            losses = []
            for crops in loader:
                losses.append(step(state.logits, crops, rate=20))
                if epoch == killed_in and len(losses) == len(loader) // 2:
                    os.kill(os.getpid(), signal.SIGKILL)
            state.losses = np.append(state.losses, np.mean(losses))
            state.epoch = epoch + 1
            state.save(checkpoint)
    return state


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2, help="threads that load (%(default)s)")
    parser.add_argument("--epochs", type=int, default=4, help="times to go over the files (%(default)s)")
    parser.add_argument("--killed-in", type=int, default=2, help="epoch from 0 in which the run ends (%(default)s)")
    parser.add_argument("--checkpoint", type=Path, help="be the run that ends, and store checkpoints here")
    options = parser.parse_args()
    if options.checkpoint:
        train(options.checkpoint, options.epochs, options.workers, options.killed_in)
        return 0

    print(interpreter())
    with tempfile.TemporaryDirectory() as folder:
        whole = train(Path(folder) / "whole.npz", options.epochs, options.workers)

        checkpoint = Path(folder) / "killed.npz"
        command = [sys.executable, __file__, "--checkpoint", str(checkpoint), "--epochs", str(options.epochs),
                   "--workers", str(options.workers), "--killed-in", str(options.killed_in)]
        killed = subprocess.run(command, check=False)
        check(killed.returncode == -signal.SIGKILL, "the first run is killed")
        left = State.load(checkpoint).epoch if checkpoint.exists() else 0
        check(left == options.killed_in, "the checkpoint is that of the last whole epoch")
        print(f"killed in epoch {options.killed_in}; the checkpoint is of the {left} epochs before it")

        # With another number of workers: neither orders nor random numbers depend on it.
        resumed = train(checkpoint, options.epochs, options.workers + 1)
    print(f"losses without the kill:   {' '.join(f'{loss:.4f}' for loss in whole.losses)}")
    print(f"losses of the resumed run: {' '.join(f'{loss:.4f}' for loss in resumed.losses)}")
    check(len(whole.losses) == options.epochs and whole.losses[-1] < whole.losses[0], "the model learns")
    check(np.array_equal(resumed.losses, whole.losses), "the losses are the same to the last bit")
    check(np.array_equal(resumed.logits, whole.logits), "the model is the same to the last bit")
    print("the models are the same to the last bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
