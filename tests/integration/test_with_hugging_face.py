"""Datasets of Hugging Face, indexed and streamed, give through our loader what they give through torch's."""

from __future__ import annotations

import pytest
from same_batches import assert_same_epochs, every_size, library

from dataloader_rs import PyDataloader

torch = library("torch")
np = library("numpy")
datasets = library("datasets")

from torch.utils.data import DataLoader, RandomSampler, default_collate  # noqa: E402

LENGTH = 26


@pytest.fixture(autouse=True)
def no_progress_bars():
    datasets.disable_progress_bars()


def table():
    return datasets.Dataset.from_dict({
        "number": list(range(LENGTH)),
        "half": [number / 2 for number in range(LENGTH)],
        "name": [f"row {number}" for number in range(LENGTH)],
        "vector": [[number, number + 1, number + 2] for number in range(LENGTH)],
    })


def fives_first(rows: dict) -> dict:
    return {"rest": [number % 5 for number in rows["number"]]}


TABLES = {
    "from_dict": table,
    "with_format numpy": lambda: table().with_format("numpy"),
    "with_format torch": lambda: table().with_format("torch"),
    "some columns": lambda: table().with_format("numpy", columns=["vector", "number"]),
    "map": lambda: table().map(fives_first, batched=True).with_format("numpy"),
    "select": lambda: table().select([7, 3, 3, 20, 11]).with_format("torch"),
    "shuffle": lambda: table().shuffle(seed=1).with_format("numpy"),
    "with_transform": lambda: table().with_transform(lambda rows: {"square": [n * n for n in rows["number"]]}),
}


@every_size
@pytest.mark.parametrize("kind", TABLES)
def test_table_gives_the_batches_of_torch(kind: str, num_workers: int):
    """A ``datasets.Dataset`` in any format is taken as it is, and read by several threads at once."""
    rows = TABLES[kind]()

    def order() -> RandomSampler:
        return RandomSampler(rows, generator=torch.Generator().manual_seed(4))

    ours = PyDataloader(rows, batch_size=4, sampler=order(), num_workers=num_workers, collate_fn=default_collate)
    theirs = DataLoader(rows, batch_size=4, sampler=order())
    assert len(ours) == len(theirs)
    assert_same_epochs(ours, theirs)


@every_size
def test_arrays_of_a_table_are_stacked_without_torch_collation(num_workers: int):
    """Rows in NumPy's format arrive as the dicts of arrays that the dataset makes, for a `collate_fn` of one's own."""
    rows = table().with_format("numpy")
    loader = PyDataloader(rows, batch_size=4, num_workers=num_workers,
                          collate_fn=lambda samples: np.stack([sample["vector"] for sample in samples]))
    np.testing.assert_array_equal(np.concatenate(list(loader)), rows[:]["vector"])


STREAMS = {
    "one shard": lambda: table().to_iterable_dataset(),
    "numpy": lambda: table().to_iterable_dataset().with_format("numpy"),
    "torch, three shards": lambda: table().to_iterable_dataset(num_shards=3).with_format("torch"),
    "map": lambda: table().to_iterable_dataset(num_shards=2).map(fives_first, batched=True, batch_size=3),
    "shuffle": lambda: table().to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=10),
    "take and skip": lambda: table().to_iterable_dataset().skip(4).take(13),
}


@every_size
@pytest.mark.parametrize("kind", STREAMS)
def test_stream_gives_the_batches_of_torch(kind: str, num_workers: int):
    """A ``datasets.IterableDataset`` is taken as it is: each row once, in the order that torch has without workers."""
    ours = PyDataloader(STREAMS[kind](), batch_size=4, num_workers=num_workers, collate_fn=default_collate)
    assert_same_epochs(ours, DataLoader(STREAMS[kind](), batch_size=4))


@every_size
def test_set_epoch_reshuffles_a_stream(num_workers: int):
    """``loader.set_epoch`` reaches the dataset, whose buffered shuffle then is that of the epoch."""
    ours_stream, their_stream = STREAMS["shuffle"](), STREAMS["shuffle"]()
    ours = PyDataloader(ours_stream, batch_size=4, num_workers=num_workers, collate_fn=default_collate)
    theirs = DataLoader(their_stream, batch_size=4)
    orders = []
    for epoch in (0, 1, 5):
        ours.set_epoch(epoch)
        their_stream.set_epoch(epoch)
        assert_same_epochs(ours, theirs, num_epochs=1)
        orders.append([batch["number"].tolist() for batch in theirs])
    assert orders[0] != orders[1] != orders[2]
