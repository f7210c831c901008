"""Random numbers of a sample depend on the seed, the epoch and its position, and on nothing else."""

from __future__ import annotations

import copy
import hashlib
import itertools
import pickle
import struct
import threading

import pytest
from reference import drained
from toy_datasets import PATIENCE, FailingDataset, GatedDataset, Ids

from dataloader_rs import PyDataloader, PyIterableDataset, sample_rng
from dataloader_rs.randomness import FOR_BATCH, FOR_SAMPLE, FOR_WORKERS, key_of, worker_seed

np = pytest.importorskip("numpy")

SIZES = [(0, 1), (0, 3), (1, 1), (1, 3), (4, 1), (4, 3)]
every_size = pytest.mark.parametrize(("num_workers", "items_in_parallel"), SIZES)


def draw(rng: np.random.Generator) -> int:
    """A number that no two generators share by chance."""
    return rng.bit_generator.random_raw()


def number_of(*numbers: int) -> int:
    """A key as NumPy's constructor takes it."""
    return int.from_bytes(key_of(*numbers), "little")


def reference(*numbers: int) -> np.random.Generator:
    """The generator with the key of these four numbers, made in the plainest way."""
    return np.random.Generator(np.random.Philox(key=number_of(*numbers)))


class Drawn(Ids):
    """``dataset[i]`` is i and a random number."""

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, draw(sample_rng())


class DrawnMany(Ids):
    """The same by whole batches."""

    def __getitems__(self, indices: list[int]):
        return [(index, draw(sample_rng(offset))) for offset, index in enumerate(indices)]


def load(dataset, batch_size: int = 1, size: tuple[int, int] = (0, 1), **arguments) -> PyDataloader:
    return PyDataloader(dataset, batch_size, num_workers=size[0], items_in_parallel=size[1], **arguments)


def epochs(loader: PyDataloader, number: int = 1) -> list[list]:
    """All samples of some epochs, one list for each."""
    return [sum(loader, []) for _ in range(number)]


def expected(rng_seed: int, epoch: int, indices) -> list[tuple[int, int]]:
    """What Drawn gives for these indices, one by one."""
    return [(index, draw(reference(FOR_SAMPLE, rng_seed, epoch, position)))
            for position, index in enumerate(indices)]


# ---- what it depends on ----


@pytest.mark.parametrize("kind", [Drawn, DrawnMany])
@pytest.mark.parametrize("batch_size", [1, 3, 7, 200, 500])
@every_size
def test_numbers_are_keyed_by_seed_epoch_and_position(kind, batch_size, num_workers, items_in_parallel):
    """B27: the same for any number of workers, batch size and way to ask; all differ, and epochs differ."""
    if kind is DrawnMany and items_in_parallel > 1:
        pytest.skip("single items")
    loader = load(kind(200), batch_size, (num_workers, items_in_parallel), rng_seed=5)
    found = epochs(loader, 2)
    assert found == [expected(5, epoch, range(200)) for epoch in (0, 1)]
    assert len({number for samples in found for _, number in samples}) == 400


@pytest.mark.parametrize("prefetch_depth", [1, 2, 50])
@every_size
def test_numbers_do_not_depend_on_prefetch_or_order_of_arrival(prefetch_depth, num_workers, items_in_parallel):
    """B27: the first item is ready last."""

    class Late(GatedDataset):
        def fetch(self, index: int) -> tuple[int, int]:
            if self.other_workers and index == 1:
                self.open(0)
            return super().fetch(index), draw(sample_rng())

    dataset = Late(30, closed={0})
    # Item 1 opens the gate of item 0, if somebody can be at it meanwhile.
    dataset.other_workers = num_workers > 1 or items_in_parallel > 1
    if not dataset.other_workers:
        dataset.open()
    loader = load(dataset, 1 if num_workers > 1 else 2, (num_workers, items_in_parallel),
                  prefetch_depth=prefetch_depth, rng_seed=5)
    assert sum(loader, []) == expected(5, 0, range(30))


@every_size
def test_position_counts_not_the_index(num_workers, items_in_parallel):
    """B27: an index that is drawn twice gets two generators; what stands at a position gets that of the position."""
    sampler = [3, 3, 0, 9, 3, 0, 1]
    loader = load(Drawn(10), 3, (num_workers, items_in_parallel), sampler=sampler, rng_seed=5)
    assert epochs(loader, 2) == [expected(5, epoch, sampler) for epoch in (0, 1)]


@pytest.mark.slow
@every_size
def test_endless_sampler_goes_on_counting(num_workers, items_in_parallel):
    """Positions beyond what iter() reads of a sampler without a length, too."""
    end = 65_536 + 50
    loader = load(Drawn(10), 1000, (num_workers, items_in_parallel), sampler=(index % 10 for index in range(end)),
                  rng_seed=5)
    found = sum(loader, [])
    assert len(found) == end
    assert found[-60:] == [
        (position % 10, draw(reference(FOR_SAMPLE, 5, 0, position)))
        for position in range(end - 60, end)]


@every_size
def test_shuffle_and_numbers_share_the_seed(num_workers, items_in_parallel):
    """``seed`` is the default of rng_seed, and a given rng_seed does not change the order."""
    size = num_workers, items_in_parallel
    loader = load(Drawn(20), 3, size, shuffle=True, seed=9)
    order = sum(load(Ids(20), 3, shuffle=True, seed=9), [])
    assert sum(loader, []) == expected(9, 0, order)
    assert sum(load(Drawn(20), 3, size, shuffle=True, seed=9, rng_seed=4), []) == expected(4, 0, order)


@every_size
def test_other_iterators_are_other_epochs(num_workers, items_in_parallel):
    """Two at a time, read by turns: each has its own number, whatever is read first."""
    loader = load(Drawn(9), 2, (num_workers, items_in_parallel), rng_seed=5)
    first, second = iter(loader), iter(loader)
    found: tuple[list, list] = ([], [])
    for _ in range(5):
        found[1].extend(next(second))
        found[0].extend(next(first))
    assert found == (expected(5, 0, range(9)), expected(5, 1, range(9)))


def test_loaders_without_a_seed_differ():
    """Fresh entropy each, a copy and a pickle too; with rng_seed they are alike."""
    loader = load(Drawn(3))
    others = [loader, load(Drawn(3)), copy.copy(loader), pickle.loads(pickle.dumps(loader))]
    assert len({other.rng_seed for other in others}) == 4
    assert len({tuple(epochs(other)[0]) for other in others}) == 4
    loader = load(Drawn(3), rng_seed=6)
    others = [loader, load(Drawn(3), rng_seed=6), copy.copy(loader), pickle.loads(pickle.dumps(loader))]
    assert {other.rng_seed for other in others} == {6}
    assert len({tuple(epochs(other)[0]) for other in others}) == 1


def test_seed_can_be_read_and_given_to_another_loader():
    """What was drawn without a seed can be drawn again."""
    loader = load(Drawn(8), 2)
    again = load(Drawn(8), 2, (4, 1), rng_seed=loader.rng_seed)
    assert epochs(loader, 2) == epochs(again, 2)


# ---- one generator for a sample ----


class Twice(Ids):
    def __getitem__(self, index: int):
        first, second = sample_rng(), sample_rng()
        assert first is second
        return draw(first), draw(second), id(first), first


@every_size
def test_second_call_goes_on_with_the_stream(num_workers, items_in_parallel):
    """It is the same object, which no other sample gets."""
    samples = sum(load(Twice(12), 4, (num_workers, items_in_parallel), rng_seed=5), [])
    for position, (first, second, _, _) in enumerate(samples):
        rng = reference(FOR_SAMPLE, 5, 0, position)
        assert (first, second) == (draw(rng), draw(rng))
    assert len({number for _, _, number, _ in samples}) == 12


def test_generator_may_be_kept_and_used_later():
    """It is an ordinary object, on any thread."""
    samples = sum(load(Twice(2), 2, (1, 1), rng_seed=5), [])
    rng = reference(FOR_SAMPLE, 5, 0, 1)
    assert [draw(rng) for _ in range(3)][2] == draw(samples[1][3])


def test_generator_spawns_the_same_ones_again(num_workers):
    """Independent streams for the parts of a sample, and a pickle of the generator, go with the sample."""

    class Spawns(Ids):
        def __getitem__(self, index: int):
            first, second = sample_rng().spawn(2)
            third, = pickle.loads(pickle.dumps(sample_rng())).spawn(1)
            return draw(first), draw(second), draw(third)

    samples = sum(load(Spawns(6), 2, (num_workers, 1), rng_seed=5), [])
    assert samples == sum(load(Spawns(6), 2, rng_seed=5), [])
    assert len(set(sum(samples, ()))) == 18


def test_jumped_stream_does_not_meet_that_of_another_sample():
    """Keys tell streams apart, so the whole counter is the sample's own."""
    rng = reference(FOR_SAMPLE, 5, 0, 0)
    jumped = rng.bit_generator.jumped()
    assert jumped.random_raw() not in [number for _, number in expected(5, 0, range(100))]


# ---- whole batches ----


class Asks(Ids):
    """Each batch is what a function returns for each of its offsets."""

    def __init__(self, length: int, function) -> None:
        super().__init__(length)
        self.function = function

    def __getitems__(self, indices: list[int]):
        return [self.function(offset, len(indices)) for offset in range(len(indices))]


def raised_by(function, *arguments) -> BaseException | None:
    try:
        function(*arguments)
    except Exception as error:
        return error
    return None


def test_offset_is_checked(num_workers):
    """It must be given, be an integer, and name one of the samples; NumPy's integers will do."""
    wrong = [-1, 3, 2**70, np.int64(-1)]
    bad = [None, 1.0, "1", True]

    def ask(offset: int, count: int):
        assert draw(sample_rng(np.int64(offset))) == draw(sample_rng(offset=offset)) or True
        return [raised_by(sample_rng, value) for value in wrong], [raised_by(sample_rng, value) for value in bad]

    for values, types in sum(load(Asks(6, ask), 3, (num_workers, 1)), []):
        assert [type(error) for error in values] == [ValueError] * 4
        assert str(values[1]) == "offset must be >= 0 and < 3, the number of samples asked for, got 3"
        assert [type(error) for error in types] == [TypeError] * 4
        assert "sample_rng(k) is for indices[k]" in str(types[0])


def test_offset_gives_the_same_object_each_time(num_workers):
    """In whatever order they are asked for."""

    def ask(offset: int, count: int):
        rngs = [sample_rng(number) for number in range(count)]
        assert all(sample_rng(number) is rngs[number] for number in reversed(range(count)))
        return draw(rngs[offset])

    found = sum(load(Asks(6, ask), 3, (num_workers, 1), rng_seed=5), [])
    assert found == [number for _, number in expected(5, 0, range(6))]


def test_answer_that_is_a_generator_may_ask_while_it_is_read(num_workers):
    """The call lasts until the samples are there."""

    class Lazy(Ids):
        def __getitems__(self, indices: list[int]):
            return ((index, draw(sample_rng(offset))) for offset, index in enumerate(indices))

    assert sum(load(Lazy(7), 3, (num_workers, 1), rng_seed=5), []) == expected(5, 0, range(7))


@every_size
def test_single_item_is_a_batch_of_one(num_workers, items_in_parallel):
    """In ``__getitem__`` offset 0 is the item itself, and there is no other."""

    class Single(Ids):
        def __getitem__(self, index: int):
            assert sample_rng(0) is sample_rng()
            return type(raised_by(sample_rng, 1)), type(raised_by(sample_rng, -1))

    assert set(sum(load(Single(7), 3, (num_workers, items_in_parallel)), [])) == {(ValueError, ValueError)}


# ---- collate_fn ----


@every_size
def test_collate_has_a_generator_of_the_batch(num_workers, items_in_parallel):
    """Keyed by the number of the batch, for any number of workers; it is none of the samples'."""

    def collate(samples):
        assert sample_rng() is sample_rng()
        assert type(raised_by(sample_rng, 0)) is TypeError
        return samples, draw(sample_rng())

    loader = load(Drawn(10), 3, (num_workers, items_in_parallel), rng_seed=5, collate_fn=collate)
    for epoch in (0, 1):
        batches = list(loader)
        assert sum((samples for samples, _ in batches), []) == expected(5, epoch, range(10))
        assert [number for _, number in batches] == [
            draw(reference(FOR_BATCH, 5, epoch, batch)) for batch in range(4)]


# ---- outside of calls ----


@every_size
def test_outside_of_a_call_it_is_a_runtime_error(num_workers, items_in_parallel):
    """On the main thread before, during and after an epoch, and on a thread that an item starts."""

    def ask_elsewhere() -> BaseException | None:
        found = []
        thread = threading.Thread(target=lambda: found.append(raised_by(sample_rng)))
        thread.start()
        thread.join()
        return found[0]

    class Elsewhere(Ids):
        def __getitem__(self, index: int):
            sample_rng()
            return type(ask_elsewhere())

    with pytest.raises(RuntimeError, match="__getitem__, __getitems__ and collate_fn"):
        sample_rng()
    for batch in load(Elsewhere(6), 2, (num_workers, items_in_parallel)):
        assert batch == [RuntimeError] * 2
        assert type(raised_by(sample_rng)) is RuntimeError
    assert type(raised_by(sample_rng)) is RuntimeError


@every_size
def test_sampler_length_and_worker_functions_are_no_calls_for_a_sample(num_workers, items_in_parallel):
    """They are not about one."""
    found = []

    class Length(Ids):
        def __len__(self) -> int:
            found.append(raised_by(sample_rng))
            return 4

    def sampler():
        found.append(raised_by(sample_rng))
        yield from range(4)

    def ask(worker_id: int) -> None:
        found.append(raised_by(sample_rng))

    size = num_workers, items_in_parallel
    for arguments in ({}, {"sampler": sampler()}):
        with load(Length(4), 2, size, worker_init_fn=ask, worker_exit_fn=ask, **arguments) as loader:
            list(loader)
    assert len(found) >= 2
    assert {type(error) for error in found} == {RuntimeError}


class Dying(Ids):
    """Samples that ask for a generator when they die; they are not made before `gate` opens."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.begun, self.gate = threading.Event(), threading.Event()
        self.found: list = []

    def __getitem__(self, index: int):
        sample_rng(0)
        self.begun.set()
        self.gate.wait(PATIENCE)
        return Dies(self.found)


class DyingMany(Dying):
    def __getitems__(self, indices: list[int]):
        return [self[index] for index in indices]


class Dies:
    def __init__(self, found: list) -> None:
        self.found = found

    def __del__(self) -> None:
        self.found.append((threading.get_ident(), type(raised_by(sample_rng, 0))))


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("kind", [Dying, DyingMany])
@pytest.mark.parametrize(("num_workers", "items_in_parallel"), [(1, 1), (1, 3), (4, 1)])
def test_batch_that_nobody_wants_dies_outside_of_its_call(kind, batch_size, num_workers, items_in_parallel):
    """On the worker that made it, which asks for nothing at that moment."""
    dataset = kind(batch_size)
    with load(dataset, batch_size, (num_workers, items_in_parallel)) as loader:
        batches = iter(loader)
        dataset.begun.wait(PATIENCE)
        del batches
        dataset.gate.set()
    assert {error for _, error in dataset.found} == {RuntimeError}
    assert threading.get_ident() not in {thread for thread, _ in dataset.found}


@every_size
def test_error_leaves_no_call_behind(num_workers, items_in_parallel):
    """After an item that raised, there is no sample, and the next batch has its own."""

    class Fails(FailingDataset):
        def __getitem__(self, index: int):
            number = draw(sample_rng())
            super().__getitem__(index)
            return index, number

    error = ValueError("damaged")
    outcomes = drained(iter(load(Fails(6, {2: error}), 2, (num_workers, items_in_parallel), rng_seed=5)))
    want = expected(5, 0, range(6))
    assert outcomes == [want[:2], error, want[4:]]
    assert type(raised_by(sample_rng)) is RuntimeError


# ---- loaders inside loaders ----


class Nests(Ids):
    """Draws, iterates another loader that draws, and draws again."""

    inner: PyDataloader

    def __getitem__(self, index: int):
        rng = sample_rng()
        before = draw(rng)
        inner = sum(self.inner, [])
        assert sample_rng() is rng
        return before, inner, draw(rng)


class NestsMany(Nests):
    def __getitems__(self, indices: list[int]):
        rngs = [sample_rng(offset) for offset in range(len(indices))]
        before = [draw(rng) for rng in rngs]
        inner = [sum(self.inner, []) for _ in rngs]
        assert [sample_rng(offset) for offset in range(len(indices))] == rngs
        return list(zip(before, inner, map(draw, rngs), strict=True))


@pytest.mark.parametrize("kind", [Nests, NestsMany])
@pytest.mark.parametrize("inner", SIZES, ids=str)
@every_size
def test_nested_loader_has_its_own_samples(kind, num_workers, items_in_parallel, inner):
    """The innermost sample is meant, and the outer one again afterwards, in the middle of its stream."""
    dataset = kind(4)
    dataset.inner = load(Drawn(3), 2, inner, rng_seed=8, collate_fn=list)
    samples = sum(load(dataset, 2, (num_workers, items_in_parallel), rng_seed=5), [])
    inner_epochs = [inner for _, inner, _ in samples]
    assert sorted(inner_epochs) == sorted(expected(8, epoch, range(3)) for epoch in range(4))
    for position, (before, _, after) in enumerate(samples):
        rng = reference(FOR_SAMPLE, 5, 0, position)
        assert (before, after) == (draw(rng), draw(rng))


def test_iterator_that_is_read_inside_an_item_has_its_own_samples():
    """Made outside, read a batch at a time inside items of another loader, and outside again."""

    class Reads(Ids):
        def __getitem__(self, index: int):
            rng = sample_rng()
            return next(self.batches), sample_rng() is rng

    dataset = Reads(2)
    dataset.batches = iter(load(Drawn(6), 2, rng_seed=8))
    found = [*sum(load(dataset, 2), []), (next(dataset.batches), True)]
    want = expected(8, 0, range(6))
    assert found == [(want[0:2], True), (want[2:4], True), (want[4:6], True)]


# ---- many threads ----


@every_size
def test_threads_do_not_mix_up_their_samples(num_workers, items_in_parallel):
    """Items that are all under way at once, between two calls."""
    at_once = max(num_workers, 1) * items_in_parallel
    barrier = threading.Barrier(at_once)

    class Meets(Ids):
        def __getitem__(self, index: int):
            rng = sample_rng()
            barrier.wait(PATIENCE)
            assert sample_rng() is rng
            return index, draw(rng)

    loader = load(Meets(4 * at_once), items_in_parallel, (num_workers, items_in_parallel), rng_seed=5, adaptive=False)
    assert sum(loader, []) == expected(5, 0, range(4 * at_once))


# ---- the key ----


def test_key_is_that_of_the_documentation():
    """Anybody can compute it, in any language."""
    for numbers in [(0, 0, 0, 0), (1, 2, 3, 4), (2, 2**64 - 1, 2**64 - 1, 2**64 - 1)]:
        digest = hashlib.blake2b(struct.pack("<4Q", *numbers), digest_size=16, person=b"dataloader_rs 1").digest()
        assert key_of(*numbers) == digest


def test_keys_are_frozen():
    """What an earlier version drew, a later one draws: keys, seeds of workers, and bits of a generator."""
    assert (FOR_SAMPLE, FOR_BATCH, FOR_WORKERS) == (0, 1, 2)
    assert [key_of(*numbers).hex() for numbers in GOLDEN_KEYS] == list(GOLDEN_KEYS.values())
    assert [hex(worker_seed(1, worker)) for worker in range(3)] == GOLDEN_SEEDS
    rng, = next(iter(load(Kept(1), rng_seed=1)))
    assert rng.bit_generator.random_raw(3).tolist() == GOLDEN_BITS


class Kept(Ids):
    def __getitem__(self, index: int):
        return sample_rng()


GOLDEN_KEYS = {
    (FOR_SAMPLE, 0, 0, 0): "cba3fc44286ca84ab6b84a333876b96f",
    (FOR_SAMPLE, 1, 0, 0): "12fc6a9250096a31808c4f4364c17eaa",
    (FOR_SAMPLE, 1, 2, 3): "571fbe126cecac52116b0c8bbf921d6c",
    (FOR_BATCH, 1, 2, 3): "fdafc795ffa26d1399f965307bc38ab3",
    (FOR_WORKERS, 1, 0, 0): "a1f0e1249985881bfd1c8f248ee36c24",
    (FOR_SAMPLE, *[2**64 - 1] * 3): "38740e6904e07561f67dbbcfe989fd59",
}
GOLDEN_SEEDS = ["0x1b88859924e1f0a1", "0xb9bfff52a42c6cb6", "0x57f7790c2376e8cb"]
GOLDEN_BITS = [5905655236381898467, 13677445009893122509, 7101485636969080011]


def test_keys_of_a_grid_differ():
    """Neighbours in each of the four numbers, and numbers that swap their places."""
    numbers = [0, 1, 2, 3, 2**32, 2**63, 2**64 - 1]
    keys = {key_of(purpose, seed, epoch, position) for purpose in range(3) for seed in numbers for epoch in numbers
            for position in numbers}
    assert len(keys) == 3 * 7**3


def test_bits_of_neighbours_are_not_alike():
    """Each bit of a key is set in about half of them, and half of the bits change from one position to the next."""
    keys = [number_of(FOR_SAMPLE, 0, 0, position) for position in range(2000)]
    for bit in range(128):
        assert 850 < sum(key >> bit & 1 for key in keys) < 1150
    changed = [(one ^ other).bit_count() for one, other in itertools.pairwise(keys)]
    assert 62 < sum(changed) / len(changed) < 66


# ---- without NumPy ----

NO_NUMPY = """
    import sys
    sys.modules["numpy"] = None
    from dataloader_rs import PyDataloader, get_worker_info, sample_rng
    from toy_datasets import Ids

    class Drawn(Ids):
        def __getitem__(self, index):
            return sample_rng()

    for num_workers in (0, 1):
        try:
            next(iter(PyDataloader(Drawn(3), num_workers=num_workers)))
        except ImportError as error:
            assert "sample_rng() needs NumPy" in str(error), error
        else:
            raise AssertionError
    def seed(samples):
        return get_worker_info().seed

    print(*PyDataloader(Ids(1), num_workers=1, collate_fn=seed, rng_seed=1))
"""


def test_without_numpy_it_is_an_import_error_that_says_so(run_script):
    """The rest works, seeds of workers too."""
    assert run_script(NO_NUMPY).stdout == f"{worker_seed(1, 0)}\n"


# ---- the argument ----


@pytest.mark.parametrize("value", [True, 1.0, "1", b"1", [1], np.float64(1)], ids=repr)
def test_seed_of_a_wrong_type_is_a_type_error(value):
    """As for ``seed``."""
    with pytest.raises(TypeError, match=r"^rng_seed must be an integer, got "):
        load(Ids(3), rng_seed=value)


@pytest.mark.parametrize("value", [-1, 2**64, -2**63, 10**20])
def test_seed_out_of_range_is_a_value_error(value):
    """The message has the rule and the value."""
    with pytest.raises(ValueError, match=rf"^rng_seed must be >= 0 and < 2\*\*64, got {value}$"):
        load(Ids(3), rng_seed=value)


@pytest.mark.parametrize("value", [0, 1, 2**63, 2**64 - 1, np.uint64(2**64 - 1), np.int8(3)])
def test_seed_in_range_is_read_back_as_an_int(value):
    """With and without shuffle, with a sampler."""
    for arguments in ({}, {"shuffle": True}, {"sampler": [0]}):
        loader = load(Ids(3), rng_seed=value, **arguments)
        assert loader.rng_seed == value
        assert type(loader.rng_seed) is int


def test_seed_that_is_really_used_can_be_read():
    """Given, that of the shuffle, or fresh; it cannot be set."""
    assert load(Ids(3), shuffle=True, seed=4).rng_seed == 4
    assert load(Ids(3), shuffle=True, seed=4, rng_seed=5).rng_seed == 5
    loader = load(Ids(3))
    assert 0 <= loader.rng_seed < 2**64
    with pytest.raises(AttributeError, match="rng_seed"):
        loader.rng_seed = 5


# ---- other kinds of epochs ----


@pytest.mark.parametrize("kind", [Drawn, DrawnMany])
@pytest.mark.parametrize("in_order", [True, False])
@every_size
def test_position_counts_through_batches_of_any_size(kind, in_order, num_workers, items_in_parallel):
    """With a batch_sampler the position is that in the whole epoch, as if the batches were put together."""
    if kind is DrawnMany and items_in_parallel > 1:
        pytest.skip("single items")
    batches = [[9, 9], [], [3], [1, 2, 4, 5], [6]] * 20
    loader = load(kind(10), 1, (num_workers, items_in_parallel), batch_sampler=batches, rng_seed=5, in_order=in_order)
    assert sorted(sum(loader, [])) == sorted(expected(5, 0, sum(batches, [])))


@every_size
def test_single_samples_have_their_positions(num_workers, items_in_parallel):
    """batch_size=None changes no number."""
    loader = load(Drawn(50), None, (num_workers, items_in_parallel), rng_seed=5)
    assert list(loader) == expected(5, 0, range(50))


@pytest.mark.parametrize("num_workers", [0, 1, 4])
def test_stream_has_no_positions_but_its_batches_have(num_workers):
    """In a stream it is a RuntimeError; collate_fn gets the generator of the batch."""

    class Draws(PyIterableDataset):
        def __iter__(self):
            for index in range(5):
                with pytest.raises(RuntimeError, match=r"sample_rng\(\) is for code that a loader calls"):
                    sample_rng()
                yield index

    loader = PyDataloader(Draws(), 2, num_workers=num_workers, rng_seed=5,
                          collate_fn=lambda samples: (samples, draw(sample_rng())))
    assert list(loader) == [(samples, draw(reference(FOR_BATCH, 5, 0, batch)))
                            for batch, samples in enumerate([[0, 1], [2, 3], [4]])]


def test_stream_that_cannot_be_read_uses_up_no_epoch():
    """As for a sampler that raises: the epoch that follows is the one that would have come."""

    class Fails(PyIterableDataset):
        fails = True

        def __iter__(self):
            if self.fails:
                raise OSError("gone")
            return iter(range(2))

    dataset = Fails()
    loader = PyDataloader(dataset, 2, rng_seed=5, collate_fn=lambda samples: draw(sample_rng()))
    with pytest.raises(OSError):
        iter(loader)
    dataset.fails = False
    assert list(loader) == [draw(reference(FOR_BATCH, 5, 0, 0))]


def test_item_of_a_worker_goes_on_with_a_greenlet_of_the_one_before(run_script):
    """The greenlet is left inside an item of a loader of its own, which ends while the next item is under way."""
    pytest.importorskip("greenlet")
    run_script("""
        import threading
        from greenlet import getcurrent, greenlet

        from dataloader_rs import PyDataloader, PyDataset, sample_rng

        kept = threading.local()

        class Inner(PyDataset):
            def __len__(self):
                return 1

            def __getitem__(self, index):
                kept.outer.switch()
                return index

        class Outer(PyDataset):
            def __len__(self):
                return 40

            def __getitem__(self, index):
                kept.outer = getcurrent()
                if index % 2 == 0:
                    kept.inner = greenlet(lambda: list(PyDataloader(Inner(), 1)))
                else:
                    sorted(range(1000), key=lambda number: -number)
                kept.inner.switch()
                return index

        def collate(samples):
            sample_rng().integers(2)
            return samples

        loader = PyDataloader(Outer(), 1, num_workers=1, collate_fn=collate)
        assert list(loader) == [[index] for index in range(40)]
    """)


def test_items_of_greenlets_take_turns(run_script):
    """A loader without workers may be left in mid-item for another, whose item is left in mid-item, too."""
    pytest.importorskip("greenlet")
    run_script("""
        from greenlet import getcurrent, greenlet

        from dataloader_rs import PyDataloader, PyDataset, sample_rng

        main = getcurrent()

        class Switching(PyDataset):
            def __len__(self):
                return 4

            def __getitem__(self, index):
                main.switch()
                return index

        def load():
            return list(PyDataloader(Switching(), 2))

        first, second = greenlet(load), greenlet(load)
        first.switch()
        second.switch()
        for turn in (first, second):
            while not turn.dead:
                batches = turn.switch()
            assert batches == [[0, 1], [2, 3]]
        for _ in range(10):
            sorted(range(1000), key=lambda number: -number)
            try:
                sample_rng()
            except RuntimeError:
                continue
            raise AssertionError("nothing is asked for here")
    """)
