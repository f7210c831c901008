"""What accelerate does with our loader: it hands it back as it is, and what that means for a training loop."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from same_batches import assert_same, every_size, library

from dataloader_rs import PyDataloader

torch = library("torch")
accelerate = library("accelerate")

from accelerate.state import AcceleratorState  # noqa: E402
from torch.utils.data import BatchSampler, DataLoader, TensorDataset, default_collate  # noqa: E402

LENGTH = 18  # in batches of 4: five, the last of them with two samples


@pytest.fixture
def accelerator():
    """A new Accelerator on the CPU: its state is one for the process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    AcceleratorState._reset_state(reset_partial_state=True)


def rows() -> TensorDataset:
    features = torch.randn(LENGTH, 4, generator=torch.Generator().manual_seed(8))
    return TensorDataset(features, features.sum(1, keepdim=True))


def loader(num_workers: int, **arguments) -> PyDataloader:
    return PyDataloader(rows(), batch_size=4, num_workers=num_workers, collate_fn=default_collate, **arguments)


def trained(accelerator, batches, num_epochs: int = 2) -> tuple[dict, list[int]]:
    """The weights after training, and the numbers of the batches, over all epochs, after which there was a step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    model, optimizer, batches = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), batches)
    steps = []
    number = 0
    for _ in range(num_epochs):
        for features, targets in batches:
            number += 1
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.mse_loss(model(features), targets))
                if accelerator.sync_gradients:
                    steps.append(number)
                optimizer.step()
                optimizer.zero_grad()
    return dict(model.state_dict()), steps


@every_size
def test_prepare_returns_our_loader_itself(accelerator, num_workers: int):
    """``prepare`` wraps torch's loader, and hands back ours: the same object, with the same batches."""
    ours = loader(num_workers)
    theirs = DataLoader(rows(), batch_size=4)
    _, prepared, prepared_torch = accelerator.prepare(torch.nn.Linear(4, 1), ours, theirs)
    assert prepared is ours
    assert prepared_torch is not theirs
    assert_same(list(prepared), list(prepared_torch))
    assert accelerator._dataloaders == [prepared_torch]


@every_size
def test_training_with_accelerate_ends_with_the_weights_of_torch(accelerator, num_workers: int):
    """Where the batches of an epoch are a multiple of those of a step, nothing differs from torch's loader."""
    ours, steps = trained(accelerator, loader(num_workers, drop_last=True))
    theirs, their_steps = trained(accelerator, DataLoader(rows(), batch_size=4, drop_last=True))
    assert steps == their_steps == [2, 4, 6, 8]
    assert_same(ours, theirs)


@every_size
def test_accumulation_goes_on_over_the_end_of_our_epoch(accelerator, num_workers: int):
    """accelerate steps at the end of an epoch of torch's loader, which it watches; it does not see the end of ours."""
    assert trained(accelerator, loader(num_workers))[1] == [2, 4, 6, 8, 10]
    assert trained(accelerator, DataLoader(rows(), batch_size=4))[1] == [2, 4, 5, 7, 9, 10]


def test_prepare_data_loader_makes_a_loader_of_torch_that_forgets_our_order(accelerator):
    """It is for torch's loader, and reads of any other the dataset and the batch size, but no order."""
    made = accelerator.prepare_data_loader(PyDataloader(rows(), 4, sampler=range(LENGTH)[::-1]))
    assert isinstance(made, DataLoader)
    assert_same(list(made), [list(batch) for batch in DataLoader(rows(), batch_size=4)])


def test_skip_first_batches_makes_a_loader_of_torch(accelerator):
    """It needs a batch sampler, and its torch loader goes on after the batches that are skipped; else it fails."""
    order = BatchSampler(range(LENGTH)[::-1], 4, False)
    skipped = accelerate.skip_first_batches(PyDataloader(rows(), batch_sampler=order), 2)
    assert isinstance(skipped, DataLoader)
    assert_same(list(skipped), list(DataLoader(rows(), batch_sampler=order))[2:])
    with pytest.raises(TypeError):
        list(accelerate.skip_first_batches(loader(0), 2))


def test_each_of_two_processes_gets_its_share_with_a_distributed_sampler_only(tmp_path):
    """In two processes ``prepare`` splits torch's loader, and ours not: there it takes a sampler.

    ``gather_for_metrics`` takes out the sample that is there twice, to make shares equal, with torch's loader only.
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent("""
        import json
        import accelerate
        import torch
        from dataloader_rs import PyDataloader
        from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, default_collate

        accelerator = accelerate.Accelerator(cpu=True)
        dataset = TensorDataset(torch.arange(15))
        sampler = DistributedSampler(dataset, accelerator.num_processes, accelerator.process_index, shuffle=False)
        ours = {"batch_size": 4, "num_workers": 2, "collate_fn": default_collate}
        loaders = accelerator.prepare(
            PyDataloader(dataset, **ours), PyDataloader(dataset, **ours, sampler=sampler), DataLoader(dataset, 4))
        seen = [[number for batch, in loader for number in batch.tolist()] for loader in loaders]
        seen += [sum(len(accelerator.gather_for_metrics(batch)) for batch, in loader) for loader in loaders[1:]]
        with open(f"{__file__}.{accelerator.process_index}", "w") as file:
            json.dump(seen, file)
    """))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, text=True,
                         env={**os.environ, **world, "RANK": rank, "LOCAL_RANK": rank})
        for rank in "01"]
    try:
        for process in processes:
            _, stderr = process.communicate(timeout=50)
            assert process.returncode == 0, stderr
    finally:
        for process in processes:
            process.kill()
    first, second = [json.loads(Path(f"{script}.{rank}").read_text()) for rank in range(2)]
    assert first[0] == second[0] == list(range(15))
    assert (first[1], second[1]) == ([0, 2, 4, 6, 8, 10, 12, 14], [1, 3, 5, 7, 9, 11, 13, 0])
    assert (first[2], second[2]) == ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 0])
    assert first[3:] == second[3:] == [16, 15]
