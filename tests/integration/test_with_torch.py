"""torch's datasets, samplers and collation give through our loader what they give through torch's."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from same_batches import assert_same, assert_same_epochs, every_size, library

import dataloader_rs
from dataloader_rs import PyDataloader

torch = library("torch")
np = library("numpy")

from torch.utils.data import (  # noqa: E402
    BatchSampler, ChainDataset, ConcatDataset, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler,
    SequentialSampler, StackDataset, Subset, SubsetRandomSampler, TensorDataset, WeightedRandomSampler, default_collate,
    get_worker_info,
)


class Point(NamedTuple):
    x: float
    y: torch.Tensor


class Samples(Dataset):
    """Each sample has one of everything that torch collates."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict:
        return {
            "image": torch.full((2, 3), index, dtype=torch.float32),
            "array": np.arange(index, index + 4, dtype=np.int16),
            "scalar": np.float64(index) / 2,
            "label": index,
            "weight": index / 4,
            "even": index % 2 == 0,
            "name": f"sample {index}",
            "raw": bytes([index]),
            "point": Point(float(index), torch.tensor([index])),
            "nested": [(index, {"deep": torch.tensor(index)})],
        }


class Stream(IterableDataset):
    """The numbers `first` .. `last` - 1 as tensors."""

    def __init__(self, first: int, last: int) -> None:
        self.first = first
        self.last = last

    def __iter__(self):
        for number in range(self.first, self.last):
            yield torch.tensor([number, -number])


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.last - self.first


def tensors(length: int) -> TensorDataset:
    return TensorDataset(torch.arange(length * 3).reshape(length, 3), torch.arange(length) % 2)


DATASETS = {
    "Dataset": lambda: Samples(23),
    "TensorDataset": lambda: tensors(23),
    "Subset": lambda: Subset(Samples(40), list(range(39, 3, -2))),
    "Subset of a Subset": lambda: Subset(Subset(Samples(40), range(0, 40, 2)), [3, 1, 4, 1, 5, 9, 2, 6]),
    "random_split": lambda: torch.utils.data.random_split(Samples(23), [15, 8], torch.Generator().manual_seed(3))[0],
    "ConcatDataset": lambda: ConcatDataset([Samples(5), Subset(Samples(30), range(20, 30)), Samples(7)]),
    "StackDataset": lambda: StackDataset(samples=Samples(23), row=tensors(23)),
}


@every_size
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", DATASETS)
def test_map_style_dataset_gives_the_batches_of_torch(kind: str, drop_last: bool, num_workers: int):
    """Each kind of dataset that torch has comes out equal, with torch's collation and a remainder."""
    dataset = DATASETS[kind]()
    ours = PyDataloader(dataset, batch_size=4, drop_last=drop_last, num_workers=num_workers, collate_fn=default_collate)
    theirs = DataLoader(dataset, batch_size=4, drop_last=drop_last)
    assert len(ours) == len(theirs)
    assert_same_epochs(ours, theirs)


@every_size
def test_collate_fn_torch_is_the_collation_of_torch(num_workers: int):
    """``collate_fn="torch"`` does what torch's loader does by default."""
    ours = PyDataloader(Samples(10), batch_size=4, num_workers=num_workers, collate_fn="torch")
    assert_same_epochs(ours, DataLoader(Samples(10), batch_size=4))


class Arrays(Samples):
    """The samples without tensors."""

    def __getitem__(self, index: int) -> dict:
        sample = super().__getitem__(index)
        return {key: sample[key] for key in ("array", "scalar", "label", "weight", "even", "name", "raw")}


@every_size
def test_our_default_collate_makes_the_arrays_that_torch_makes_tensors_of(num_workers: int):
    """``dataloader_rs.default_collate`` stacks what torch's collation stacks: same shapes, data types and values."""
    ours = PyDataloader(Arrays(10), batch_size=4, num_workers=num_workers, collate_fn=dataloader_rs.default_collate)
    theirs = [{key: value.numpy() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
              for batch in DataLoader(Arrays(10), batch_size=4)]
    assert_same_epochs(ours, theirs)


@every_size
def test_single_samples_are_those_of_torch(num_workers: int):
    """``batch_size=None`` gives one sample after the other, uncollated with ``collate_fn=None``."""
    ours = PyDataloader(Samples(5), batch_size=None, num_workers=num_workers)
    assert_same_epochs(ours, DataLoader(Samples(5), batch_size=None, collate_fn=lambda sample: sample))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


SAMPLERS = {
    "SequentialSampler": lambda dataset: SequentialSampler(dataset),
    "RandomSampler": lambda dataset: RandomSampler(dataset, generator=generator()),
    "RandomSampler with replacement": lambda dataset: RandomSampler(dataset, True, 50, generator=generator()),
    "SubsetRandomSampler": lambda dataset: SubsetRandomSampler(range(3, 20), generator=generator()),
    "WeightedRandomSampler": lambda dataset: WeightedRandomSampler(
        [number % 3 for number in range(len(dataset))], 30, generator=generator()),
}


@every_size
@pytest.mark.parametrize("kind", SAMPLERS)
def test_sampler_gives_the_batches_of_torch(kind: str, num_workers: int):
    """A sampler of torch, seeded alike, gives equal batches in the first epoch and in the next."""
    dataset = Samples(23)
    ours = PyDataloader(dataset, batch_size=5, sampler=SAMPLERS[kind](dataset), num_workers=num_workers,
                        collate_fn=default_collate)
    theirs = DataLoader(dataset, batch_size=5, sampler=SAMPLERS[kind](dataset))
    assert len(ours) == len(theirs)
    assert_same_epochs(ours, theirs, num_epochs=3)


@every_size
@pytest.mark.parametrize("drop_last", [False, True])
def test_batch_sampler_gives_the_batches_of_torch(drop_last: bool, num_workers: int):
    """torch's ``BatchSampler`` over a random sampler, as `batch_sampler`."""
    dataset = Samples(23)

    def batches() -> BatchSampler:
        return BatchSampler(RandomSampler(dataset, generator=generator()), 4, drop_last)

    ours = PyDataloader(dataset, batch_sampler=batches(), num_workers=num_workers, collate_fn=default_collate)
    theirs = DataLoader(dataset, batch_sampler=batches())
    assert len(ours) == len(theirs)
    assert_same_epochs(ours, theirs)


@every_size
def test_distributed_sampler_gives_the_batches_of_torch(num_workers: int):
    """Each rank gets the batches that torch's loader gives it, ``set_epoch`` reshuffles, and no sample is missing."""
    dataset = Samples(22)
    orders = []
    samplers = [[DistributedSampler(dataset, num_replicas=2, rank=rank, seed=5) for rank in range(2)]
                for _ in range(2)]
    ours = [PyDataloader(dataset, batch_size=4, sampler=sampler, num_workers=num_workers, collate_fn=default_collate)
            for sampler in samplers[0]]
    theirs = [DataLoader(dataset, batch_size=4, sampler=sampler) for sampler in samplers[1]]
    for epoch in (0, 1, 7):
        for sampler in sum(samplers, []):
            sampler.set_epoch(epoch)
        batches = [list(loader) for loader in ours]
        assert_same(batches, [list(loader) for loader in theirs])
        orders.append([batch["label"].tolist() for rank in batches for batch in rank])
        assert sorted(sum(orders[-1], [])) == list(range(22))
    assert orders[0] != orders[1] != orders[2] != orders[0]


@every_size
def test_set_epoch_of_the_loader_reaches_a_distributed_sampler(num_workers: int):
    """``loader.set_epoch`` does what ``sampler.set_epoch`` does."""
    dataset = Samples(22)
    told, sampler = [DistributedSampler(dataset, num_replicas=2, rank=1, seed=5) for _ in range(2)]
    ours = PyDataloader(dataset, batch_size=4, sampler=told, num_workers=num_workers, collate_fn=default_collate)
    theirs = DataLoader(dataset, batch_size=4, sampler=sampler)
    for epoch in (3, 4):
        ours.set_epoch(epoch)
        sampler.set_epoch(epoch)
        assert_same_epochs(ours, theirs, num_epochs=1)


STREAMS = {
    "IterableDataset": lambda: Stream(0, 23),
    "with a length": lambda: SizedStream(0, 23),
    "ChainDataset": lambda: ChainDataset([Stream(0, 9), Stream(4, 5), Stream(20, 30)]),
}


@every_size
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", STREAMS)
def test_iterable_dataset_gives_the_batches_of_torch(kind: str, drop_last: bool, num_workers: int):
    """A stream comes once and in its order with any number of workers, as from torch without workers."""
    ours = PyDataloader(STREAMS[kind](), batch_size=4, drop_last=drop_last, num_workers=num_workers,
                        collate_fn=default_collate)
    theirs = DataLoader(STREAMS[kind](), batch_size=4, drop_last=drop_last)
    if kind == "with a length":
        assert len(ours) == len(theirs)
    assert_same_epochs(ours, theirs)


class SplitStream(Stream):
    """Splits itself between worker processes, in the way torch's documentation tells to."""

    def __iter__(self):
        info = get_worker_info()
        first, step = (self.first, 1) if info is None else (self.first + info.id, info.num_workers)
        for number in range(first, self.last, step):
            yield torch.tensor([number, -number])


@every_size
def test_stream_that_splits_itself_between_workers_is_read_whole(num_workers: int):
    """torch's ``get_worker_info`` is None on our workers, which share one iterator: no sample is lost or doubled."""
    ours = PyDataloader(SplitStream(0, 23), batch_size=4, num_workers=num_workers, collate_fn=default_collate)
    assert_same_epochs(ours, DataLoader(Stream(0, 23), batch_size=4))


@every_size
def test_training_ends_with_the_weights_of_torch(num_workers: int):
    """A model trained on our batches is, to the last bit, the one trained on those of torch's loader."""
    features = torch.randn(60, 4, generator=generator())
    dataset = TensorDataset(features, (features @ torch.tensor([1.0, -2.0, 0.5, 3.0])).unsqueeze(1))

    def trained(loader) -> dict:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(3):
            for inputs, targets in loader:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
        return dict(model.state_dict())

    ours = PyDataloader(dataset, batch_size=8, sampler=RandomSampler(dataset, generator=generator()),
                        num_workers=num_workers, collate_fn=default_collate)
    theirs = DataLoader(dataset, batch_size=8, sampler=RandomSampler(dataset, generator=generator()))
    assert_same(trained(ours), trained(theirs))
