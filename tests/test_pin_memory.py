"""pin_memory: what can be pinned is, in containers that keep their type; without a device there is one warning."""

from __future__ import annotations

import collections
import sys
import threading
import types
import warnings
from typing import NamedTuple

import pytest
from conftest import run_threaded
from toy_datasets import Ids

from dataloader_rs import PyDataloader, pinning


class Tensor:
    """Something that can be pinned."""

    def __init__(self, value, pinned: bool = False, thread: int = 0):
        self.value = value
        self.pinned = pinned
        self.thread = thread

    def pin_memory(self) -> Tensor:
        return Tensor(self.value, True, threading.get_native_id())


class Pair(NamedTuple):
    image: object
    label: object


class Attributed(dict):
    """A dict that has more than its keys."""


class Attribute:
    """Has an attribute of that name, which is no method of its class."""

    pin_memory = "yes"


@pytest.fixture(autouse=True)
def fresh_warning(monkeypatch):
    """Each test is the first to warn."""
    monkeypatch.setattr(pinning, "_warned", threading.Lock())


def device(available: bool, kind: str = "cuda", **attributes):
    return types.SimpleNamespace(is_available=lambda: available,
                                 current_accelerator=lambda: types.SimpleNamespace(type=kind), **attributes)


@pytest.fixture
def with_device(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=device(True)))


def test_tensors_are_pinned_in_containers_that_keep_their_type(with_device):
    """B57 for pinning: dict, OrderedDict, defaultdict, subclasses, list, tuple, named tuple, nested in each other."""
    attributed = Attributed(x=Tensor(1))
    attributed.origin = "disk"
    batch = {
        "tensor": Tensor(0), "attributed": attributed, "ordered": collections.OrderedDict(b=Tensor(2), a=Tensor(3)),
        "default": collections.defaultdict(list, x=Tensor(4)), "list": [Tensor(5), (Tensor(6), "text")],
        "pair": Pair(Tensor(7), [Tensor(8)]), "deque": collections.deque([Tensor(9)], maxlen=3),
        "user": collections.UserDict(x=Tensor(10)), "proxy": types.MappingProxyType({"x": Tensor(11)}),
    }
    pinned = pinning.pin(batch)
    assert list(pinned) == list(batch) and all(type(pinned[key]) is type(batch[key]) for key in batch)
    found = [pinned["tensor"], pinned["attributed"]["x"], *pinned["ordered"].values(), pinned["default"]["x"],
             pinned["list"][0], pinned["list"][1][0], pinned["pair"].image, pinned["pair"].label[0],
             pinned["deque"][0], pinned["user"]["x"], pinned["proxy"]["x"]]
    assert [(tensor.value, tensor.pinned) for tensor in found] == [
        (value, True) for value in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)]
    assert pinned["attributed"].origin == "disk" and pinned["default"].default_factory is list
    assert pinned["deque"].maxlen == 3 and list(pinned["ordered"]) == ["b", "a"]
    assert not batch["tensor"].pinned and not batch["list"][0].pinned and not attributed["x"].pinned


def test_all_else_is_the_same_object(with_device):
    """Texts, numbers, arrays, sets, unknown objects, and containers without tensors are passed on untouched."""
    values = ["text", b"bytes", 1, 2.5, None, {1, 2}, object(), [1, 2], {"a": (1, "b")}, Pair(1, 2), range(3),
              bytearray(b"x"), Attribute(), Tensor, collections.Counter("ab")]
    for value in values:
        assert pinning.pin(value) is value
    batch = {"x": Tensor(1), "kept": values}
    assert pinning.pin(batch)["kept"] is values
    numpy = pytest.importorskip("numpy")
    array = numpy.zeros(3)
    assert pinning.pin([array])[0] is array


def test_containers_that_cannot_be_rebuilt_become_plain(with_device):
    """A tuple whose class asks for other arguments becomes a tuple, a mapping a dict: the tensors count."""

    class Strict(tuple):
        __slots__ = ()

        def __new__(cls, left, right):
            return super().__new__(cls, (left, right))

    pinned = pinning.pin(Strict(Tensor(1), 2))
    assert type(pinned) is tuple and pinned[0].pinned and pinned[1] == 2


@pytest.mark.parametrize("torch", [
    None, types.SimpleNamespace(cuda=device(False)), types.SimpleNamespace(),
    types.SimpleNamespace(cuda=device(False), accelerator=device(False)),
    types.SimpleNamespace(cuda=device(False), accelerator=device(True, "mps")),
], ids=["no torch", "no cuda", "no module", "no accelerator", "shared memory"])
def test_without_a_device_batches_stay_as_they_are_and_one_warning_says_so(monkeypatch, torch):
    """One for the process, from however many threads and batches."""
    monkeypatch.setitem(sys.modules, "torch", torch)
    batch = [Tensor(1)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_threaded(lambda number: [pinning.pin(batch) is batch or pytest.fail("changed") for _ in range(20)], 4)
    assert [warning.category for warning in caught] == [RuntimeWarning]
    assert str(caught[0].message).startswith("pin_memory=True has no effect, batches are left as they are: ")
    assert not batch[0].pinned


def test_other_accelerators_count(monkeypatch):
    """A device that torch knows only as an accelerator is one."""
    torch = types.SimpleNamespace(cuda=device(False), accelerator=device(True, "xpu"))
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert pinning.pin(Tensor(1)).pinned


@pytest.mark.parametrize("message", [
    "Cannot access accelerator device when none is available.",
    "Need to provide pin_memory allocator to use pin memory.",
    "Found no NVIDIA driver on your system.\nPlease check",
    "Could not run 'aten::_pin_memory' with arguments from the 'CPU' backend.",
])
def test_torch_that_finds_no_device_when_it_pins_is_no_error(with_device, message):
    """What torch says then becomes the warning."""

    class Unpinnable(Tensor):
        def pin_memory(self):
            raise RuntimeError(message)

    batch = {"x": Unpinnable(1)}
    with pytest.warns(RuntimeWarning, match="torch says: " + message.splitlines()[0][:20]):
        assert pinning.pin(batch) is batch
    assert pinning.pin(batch) is batch


def test_other_errors_of_pinning_come_out(with_device):
    """Memory that runs out is no reason to go on in silence."""

    class Failing(Tensor):
        def pin_memory(self):
            raise RuntimeError("CUDA error: out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        pinning.pin([Failing(1)])


@pytest.mark.parametrize("collate_fn", [None, lambda samples: {"x": samples}], ids=["list", "function"])
def test_pinning_runs_where_collate_fn_runs(with_device, num_workers, collate_fn):
    """On the workers; without a collate_fn the list itself is pinned."""

    class Tensors(Ids):
        def __getitem__(self, index: int) -> Tensor:
            return Tensor(index)

    loader = PyDataloader(Tensors(7), batch_size=2, num_workers=num_workers,
                          collate_fn=pinning.pinned_collate(collate_fn))
    batches = [batch if collate_fn is None else batch["x"] for batch in loader]
    assert [[tensor.value for tensor in batch] for batch in batches] == [[0, 1], [2, 3], [4, 5], [6]]
    threads = {tensor.thread for batch in batches for tensor in batch}
    assert all(tensor.pinned for batch in batches for tensor in batch)
    assert (threading.get_native_id() in threads) == (num_workers == 0)


def test_torch_is_not_imported_for_it(run_script):
    """Pinning without torch leaves torch alone."""
    run_script("""
        import sys
        import warnings
        from dataloader_rs import pinning

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert pinning.pinned_collate(None)([1, 2]) == [1, 2]
        assert len(caught) == 1 and "torch is not imported" in str(caught[0].message)
        assert "torch" not in sys.modules
        """)


def test_real_torch_without_a_device_leaves_tensors(monkeypatch):
    """With torch itself, where there is no accelerator."""
    torch = pytest.importorskip("torch")
    if pinning._has_device(torch):
        pytest.skip("there is an accelerator")
    batch = {"x": torch.arange(3)}
    with pytest.warns(RuntimeWarning, match="torch finds no accelerator"):
        assert pinning.pin(batch) is batch
    monkeypatch.setattr(pinning, "_has_device", lambda torch: True)
    monkeypatch.setattr(pinning, "_warned", threading.Lock())
    with pytest.warns(RuntimeWarning, match="torch says: "):
        assert pinning.pin(batch) is batch


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_pins_batches_after_collate_fn(run_script, num_workers):
    """pin_memory=True: what collate_fn returns is pinned, on the worker; without it a batch is the list."""
    run_script("""
        import sys, threading, types
        from dataloader_rs import PyDataloader, PyDataset

        num_workers = int(sys.argv[1])
        torch = types.ModuleType("torch")
        torch.cuda = types.SimpleNamespace(is_available=lambda: True)
        sys.modules["torch"] = torch

        class Tensor:
            def __init__(self, number, pinned_by=None):
                self.number, self.pinned_by = number, pinned_by
            def pin_memory(self):
                return Tensor(self.number, threading.get_ident())

        tensors = PyDataset.of([Tensor(number) for number in range(4)])
        for collate_fn in (None, lambda samples: {"all": tuple(samples)}):
            loader = PyDataloader(tensors, 2, num_workers=num_workers, collate_fn=collate_fn, pin_memory=True)
            batches = [batch if collate_fn is None else batch["all"] for batch in loader]
            assert [[tensor.number for tensor in batch] for batch in batches] == [[0, 1], [2, 3]]
            pinned_by = {tensor.pinned_by for batch in batches for tensor in batch}
            assert None not in pinned_by
            assert (threading.get_ident() in pinned_by) == (num_workers == 0)
        """, str(num_workers))
