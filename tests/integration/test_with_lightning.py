"""PyTorch Lightning trains with our loader: each epoch has every sample, in an order of its own."""

from __future__ import annotations

import pytest
from same_batches import every_size, library

from dataloader_rs import PyDataloader

torch = library("torch")
pl = library("lightning.pytorch")

from torch.utils.data import (  # noqa: E402
    BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, default_collate,
)

# Trainer and Fabric warn of the machine, and of what they themselves call.
pytestmark = pytest.mark.filterwarnings("ignore")

LENGTH = 30


class Rows(Dataset):
    """Sample i is (i, a row, a target)."""

    def __init__(self, length: int = LENGTH) -> None:
        self.features = torch.randn(length, 4, generator=torch.Generator().manual_seed(9))

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple:
        return index, self.features[index], self.features[index].sum()


class Regression(pl.LightningModule):
    """A linear model that notes the indices of the batches it sees, by epoch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
        self.seen: list[list[list[int]]] = []
        self.validated: list[int] = []

    def loss(self, features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layer(features).squeeze(1), targets)

    def on_train_epoch_start(self) -> None:
        self.seen.append([])

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        indices, features, targets = batch
        assert batch_idx == len(self.seen[-1])
        self.seen[-1].append(indices.tolist())
        return self.loss(features, targets)

    def validation_step(self, batch, batch_idx: int) -> None:
        self.validated += batch[0].tolist()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def trainer(tmp_path, **arguments):
    off = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    return pl.Trainer(accelerator="cpu", devices=1, default_root_dir=tmp_path, **off, **{"max_epochs": 2, **arguments})


def loader(num_workers: int, **arguments) -> PyDataloader:
    return PyDataloader(Rows(), num_workers=num_workers, collate_fn=default_collate, **arguments)


@every_size
@pytest.mark.parametrize("across_epochs", [False, True])
def test_fit_sees_every_sample_each_epoch_in_another_order(tmp_path, across_epochs: bool, num_workers: int):
    """Two epochs of `Trainer.fit`, with a smaller last batch, are epochs 1 and 2 of the loader.

    Lightning asks whatever is no loader of torch's for an iterator, to see whether it can: that one is epoch 0.
    """
    ours = loader(num_workers, batch_size=4, shuffle=True, seed=5, across_epochs=across_epochs)
    model = Regression()
    fitting = trainer(tmp_path)
    fitting.fit(model, ours)
    assert [sorted(sum(epoch, [])) for epoch in model.seen] == [list(range(LENGTH))] * 2
    assert model.seen[0] != model.seen[1]
    assert fitting.num_training_batches == len(ours) == 8
    alone = loader(0, batch_size=4, shuffle=True, seed=5)
    epochs = [[batch[0].tolist() for batch in alone] for _ in range(3)]
    assert model.seen == epochs[1:]


@every_size
def test_fit_ends_with_the_weights_of_torch(tmp_path, num_workers: int):
    """In the same order, a model that is fitted with our loader is the one that is fitted with torch's."""
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(1)).tolist()
    models = [Regression(), Regression()]
    trainer(tmp_path).fit(models[0], loader(num_workers, batch_size=4, sampler=order))
    trainer(tmp_path).fit(models[1], DataLoader(Rows(), batch_size=4, sampler=order))
    assert models[0].seen == models[1].seen
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)


@every_size
def test_fit_validates_with_our_loader_and_may_stop_early(tmp_path, num_workers: int):
    """A validation loader is read whole after each epoch, though training leaves each of its own half-way."""
    model = Regression()
    trainer(tmp_path, limit_train_batches=3, num_sanity_val_steps=0).fit(
        model, loader(num_workers, batch_size=4, shuffle=True), loader(num_workers, batch_size=7))
    assert [len(epoch) for epoch in model.seen] == [3, 3]
    assert model.validated == [*range(LENGTH)] * 2


class RowStream(IterableDataset):
    def __iter__(self):
        return map(Rows().__getitem__, range(LENGTH))


@every_size
def test_fit_trains_on_a_stream(tmp_path, num_workers: int):
    """A stream that does not say how long it is comes whole and in its order, each epoch."""
    model = Regression()
    trainer(tmp_path).fit(model, PyDataloader(RowStream(), 4, num_workers=num_workers, collate_fn=default_collate))
    assert [sum(epoch, []) for epoch in model.seen] == [[*range(LENGTH)]] * 2


@pytest.mark.parametrize("wrapped", [False, True], ids=["sampler", "batch_sampler"])
def test_fit_tells_the_sampler_the_epoch(tmp_path, wrapped: bool):
    """Lightning finds a ``DistributedSampler`` in our `sampler`, or in our `batch_sampler`, and calls ``set_epoch``."""
    told, reference = [DistributedSampler(Rows(), num_replicas=2, rank=1, seed=2) for _ in range(2)]
    order = {"batch_sampler": BatchSampler(told, 5, False)} if wrapped else {"sampler": told, "batch_size": 5}
    model = Regression()
    trainer(tmp_path, max_epochs=3).fit(model, loader(2, **order))
    for epoch, seen in enumerate(model.seen):
        reference.set_epoch(epoch)
        assert sum(seen, []) == list(reference)
    assert model.seen[0] != model.seen[1] != model.seen[2]


def test_fabric_takes_torch_loaders_only():
    """``Fabric.setup_dataloaders`` refuses ours; it is used as it is."""
    fabric = library("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    with pytest.raises(TypeError, match="Only PyTorch DataLoader"):
        fabric.setup_dataloaders(loader(0, batch_size=4))
