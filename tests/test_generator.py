"""``generator=``: the orders of a shuffle come from the program's own generator, one number an epoch."""

import copy
import pickle
import random
import reprlib
import threading

import numpy as np
import pytest
from conftest import run_threaded
from toy_datasets import Ids

from dataloader_rs import PyDataloader
from dataloader_rs._shuffle import ShuffledOrder


def from_numpy(seed):
    return np.random.default_rng(seed)


def from_random(seed):
    return random.Random(seed)


def from_torch(seed):
    # Not imported by this module: the tests of all other kinds are to run without it.
    return pytest.importorskip("torch").Generator().manual_seed(seed)


def next_number(generator):
    """What the next epoch is to be keyed by, drawn as each library is documented to."""
    if isinstance(generator, np.random.Generator):
        return int(generator.integers(2**64, dtype=np.uint64))
    if isinstance(generator, random.Random):
        return generator.getrandbits(64)
    torch = pytest.importorskip("torch")
    return int(torch.empty((), dtype=torch.int64).random_(-2**63, None, generator=generator)) % 2**64


def orders(count, length=30, **options):
    """The orders of the first `count` epochs of a new loader."""
    loader = PyDataloader(Ids(length), 7, shuffle=True, **options)
    return [sum(loader, []) for _ in range(count)]


every_kind = pytest.mark.parametrize("make", [from_numpy, from_random, from_torch])


class Tripwire(random.Random):
    """Notices a second thread that is let in while a first one draws."""

    def __init__(self, seed, patience=0.2):
        super().__init__(seed)
        self.patience = patience
        self.inside = threading.Lock()
        self.first_is_in = threading.Event()
        self.second_is_in = threading.Event()

    def getrandbits(self, bits):
        if not self.inside.acquire(blocking=False):
            self.second_is_in.set()
            return super().getrandbits(bits)
        self.first_is_in.set()
        self.second_is_in.wait(self.patience)
        self.inside.release()
        return super().getrandbits(bits)


# ---- what is a generator ----

@every_kind
def test_generator_is_accepted_and_read_back(make, num_workers):
    """B55: the object itself; every index comes once an epoch."""
    generator = make(1)
    loader = PyDataloader(Ids(20), 6, shuffle=True, generator=generator, num_workers=num_workers)
    assert loader.generator is generator
    assert PyDataloader(Ids(20)).generator is None
    assert sorted(sum(loader, [])) == list(range(20))


@pytest.mark.parametrize("generator", [random.SystemRandom(), np.random.Generator(np.random.MT19937(3)),
                                       Tripwire(0, patience=0)], ids=["system", "numpy-32-bit", "subclass"])
def test_other_sources_of_the_kinds_are_generators(generator):
    """Subclasses, and any bit generator of NumPy, one of 32 bits at a time too."""
    first, second = orders(2, generator=generator)
    assert sorted(first) == sorted(second) == list(range(30))
    assert first != second


@pytest.mark.parametrize("value", [5, 0, True, "torch", random, random.Random, np.random, np.random.RandomState(1),
                                   np.random.PCG64(1), np.random.default_rng, [random.Random(1)]],
                         ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("shuffle", [False, True])
def test_anything_else_is_a_type_error(value, shuffle):
    """The message has the name, the rule and the value, with shuffle and without."""
    with pytest.raises(TypeError) as caught:
        PyDataloader(Ids(5), shuffle=shuffle, generator=value)
    assert str(caught.value).startswith("generator must be a numpy.random.Generator, random.Random, torch.Generator "
                                        "or None, got ")
    assert str(caught.value).endswith(f"({type(value).__name__})")


def test_object_that_calls_itself_a_generator_is_none():
    """What counts is the type: ``__class__`` may answer anything."""
    class Pretender:
        __class__ = random.Random

    with pytest.raises(TypeError, match=r"^generator must be .*\(Pretender\)$"):
        PyDataloader(Ids(5), generator=Pretender())


def test_checking_and_drawing_imports_nothing(run_script):
    """Neither NumPy nor torch is imported, for a generator that is one or for one that is none."""
    run_script("""
        import sys
        import random
        from dataloader_rs import PyDataloader
        from toy_datasets import Ids

        loader = PyDataloader(Ids(9), 9, shuffle=True, generator=random.Random(1), num_workers=2)
        assert sorted(sum(loader, [])) == list(range(9))
        try:
            PyDataloader(Ids(9), generator=object())
        except TypeError:
            assert not {"numpy", "torch"} & set(sys.modules)
        else:
            raise AssertionError("accepted")
        """)


def test_generator_of_an_imported_torch_is_one(run_script):
    """torch's generator is known by what is in ``sys.modules``; 64 bits are drawn, on the device of the generator."""
    run_script("""
        import sys
        import types

        class Generator:
            device = "device of the generator"
            draws = 0

        class Tensor:
            def random_(self, low, high, *, generator):
                generator.draws += 1
                self.number = low + generator.draws
                assert high is None
                return self

            def item(self):
                return self.number

        def empty(shape, *, dtype, device):
            assert (shape, dtype, device) == ((), "64 bits", Generator.device)
            return Tensor()

        from dataloader_rs import PyDataloader
        from toy_datasets import Ids

        generator = Generator()
        try:
            PyDataloader(Ids(9), shuffle=True, generator=generator)
        except TypeError:
            pass
        else:
            raise AssertionError("accepted before the import")
        sys.modules["torch"] = types.ModuleType("torch")
        sys.modules["torch"].__dict__.update(Generator=Generator, empty=empty, int64="64 bits")
        loader = PyDataloader(Ids(9), 9, shuffle=True, generator=generator)
        first, second = list(loader), list(loader)
        assert first != second and generator.draws == 2
        assert first == list(PyDataloader(Ids(9), 9, shuffle=True, seed=2**63 + 1))
        """)


# ---- with other arguments ----

@every_kind
def test_seed_and_generator_together_are_a_value_error(make):
    """One of the two gives the orders; the message names both."""
    generator = make(1)
    with pytest.raises(ValueError) as caught:
        PyDataloader(Ids(5), shuffle=True, seed=3, generator=generator)
    assert str(caught.value) == (f"seed and generator are mutually exclusive, got seed=3 and "
                                 f"generator={reprlib.repr(generator)}")


@every_kind
@pytest.mark.parametrize("options", [{}, {"sampler": [3, 1, 2]}], ids=str)
def test_generator_without_shuffle_is_unused(make, options, num_workers):
    """Accepted, as torch does, and not drawn from."""
    generator, untouched = make(1), make(1)
    loader = PyDataloader(Ids(5), 5, generator=generator, num_workers=num_workers, **options)
    assert list(loader) == [options.get("sampler", [0, 1, 2, 3, 4])]
    assert next_number(generator) == next_number(untouched)


# ---- what is drawn ----

@pytest.mark.slow
@every_kind
@pytest.mark.parametrize("length", [30, 70_000])
def test_each_epoch_is_keyed_by_one_number(make, length):
    """The order is that of a shuffle with the number as its seed, in its epoch 0. To change that would reorder runs."""
    twin = make(5)
    for order in orders(3, length=length, generator=make(5)):
        assert order == ShuffledOrder(length, next_number(twin), 0)[:]


def test_orders_of_a_generator_are_frozen():
    """Python's own generator gives the same bits everywhere, so these orders are the same everywhere."""
    assert orders(2, length=10, generator=random.Random(0)) == [[2, 0, 1, 7, 3, 9, 4, 6, 8, 5],
                                                                [1, 2, 4, 9, 6, 0, 7, 3, 8, 5]]


@every_kind
def test_state_after_epochs_does_not_depend_on_workers(make):
    """The same orders, and the same numbers afterwards, for any number of workers, prefetch and batch size."""
    seen = []
    for options in ({}, {"num_workers": 1}, {"num_workers": 4, "prefetch_depth": 9}, {"items_in_parallel": 3}):
        generator = make(7)
        seen.append((orders(3, generator=generator, **options), next_number(generator)))
    assert all(one == seen[0] for one in seen)


@every_kind
def test_every_iter_draws_once_and_nothing_else_does(make, num_workers):
    """Epochs that are left, not begun or empty count; ``len``, ``repr`` and an ``iter`` that fails do not."""
    class Failing(Ids):
        def __len__(self):
            raise OSError("no length")

    generator, twin = make(9), make(9)
    loader = PyDataloader(Ids(12), 5, shuffle=True, generator=generator, num_workers=num_workers)
    assert (len(loader), repr(loader) != "") == (3, True)
    with pytest.raises(OSError, match="no length"):
        iter(PyDataloader(Failing(3), shuffle=True, generator=generator, num_workers=num_workers))
    untouched = iter(loader)
    next(iter(loader))
    list(loader)
    list(PyDataloader(Ids(0), shuffle=True, generator=generator, num_workers=num_workers))
    for _ in range(4):
        next_number(twin)
    assert next_number(generator) == next_number(twin)
    assert len(list(untouched)) == 3


def test_global_generators_are_untouched():
    """B25: only the generator that was given is drawn from."""
    before = random.getstate(), np.random.get_state()[1].tolist()
    orders(2, generator=random.Random(1))
    orders(2, generator=np.random.default_rng(1))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_generator_that_raises_comes_out_of_iter():
    """It is the user's own error, and the next epoch draws again."""
    class Failing(random.Random):
        fails = True

        def getrandbits(self, bits):
            if self.fails:
                raise OSError("no entropy")
            return super().getrandbits(bits)

    generator = Failing(1)
    loader = PyDataloader(Ids(6), 6, shuffle=True, generator=generator)
    with pytest.raises(OSError, match="no entropy"):
        iter(loader)
    generator.fails = False
    assert sorted(sum(loader, [])) == list(range(6))


# ---- threads, forks, copies ----

@pytest.mark.parametrize("loaders", [1, 2])
def test_generator_is_entered_by_one_thread_at_a_time(loaders):
    """Epochs that several threads start at once, of one loader or of two, take turns at the generator."""
    generator = Tripwire(3)
    made = [PyDataloader(Ids(12), 12, shuffle=True, generator=generator) for _ in range(loaders)]
    run_threaded(lambda number: iter(made[number % loaders]), 2)
    assert not generator.second_is_in.is_set()


@every_kind
def test_threads_that_start_epochs_get_each_order_once(make):
    """Together they see the orders that one thread would have seen, and the state afterwards is the same."""
    generator, twin = make(4), make(4)
    loader = PyDataloader(Ids(30), 30, shuffle=True, generator=generator)
    seen = run_threaded(lambda number: [next(iter(loader)) for _ in range(25)], 8)
    assert sorted(sum(seen, [])) == sorted(orders(200, generator=twin))
    assert next_number(generator) == next_number(twin)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))],
                         ids=["deepcopy", "pickle"])
@every_kind
def test_duplicate_has_a_generator_of_its_own(duplicate, make):
    """A deep copy or a pickle goes on from the state that the generator had, and leaves the original's alone."""
    loader = PyDataloader(Ids(30), 7, shuffle=True, generator=make(2), num_workers=1)
    list(loader)
    twin = duplicate(loader)
    assert twin.generator is not loader.generator
    assert [list(twin) for _ in range(2)] == [list(loader) for _ in range(2)]


def test_shallow_copy_shares_the_generator():
    """As Python copies: the two loaders take turns at its numbers."""
    loader = PyDataloader(Ids(30), 30, shuffle=True, generator=random.Random(2))
    twin = copy.copy(loader)
    assert twin.generator is loader.generator
    assert [*loader, *twin, *loader] == orders(3, generator=random.Random(2))


def test_child_that_is_forked_while_a_thread_draws_can_draw(run_script):
    """The turn of a thread that does not exist in the child is not waited for."""
    run_script("""
        import os
        import random
        import signal
        import threading
        import warnings
        from dataloader_rs import PyDataloader
        from toy_datasets import Ids

        warnings.filterwarnings("ignore", "This process", DeprecationWarning)
        entered, leave = threading.Event(), threading.Event()

        class Slow(random.Random):
            def getrandbits(self, bits):
                entered.set()
                leave.wait(20)
                return super().getrandbits(bits)

        slow = PyDataloader(Ids(5), shuffle=True, generator=Slow(1))
        thread = threading.Thread(target=iter, args=(slow,))
        thread.start()
        entered.wait(20)
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            assert len(list(PyDataloader(Ids(5), shuffle=True, generator=random.Random(1)))) == 5
            os._exit(0)
        assert os.waitpid(child, 0) == (child, 0)
        leave.set()
        thread.join()
        """, timeout=15)
