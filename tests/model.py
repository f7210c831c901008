"""The model of a loader: what each of its epochs must give, by the sequential loader of ``reference.py``.

Orders and random numbers are taken neither from workers nor from another loader: a shuffle is `ShuffledOrder`, which
``test_order.py`` and ``test_shuffle.py`` hold to fixed vectors, of the seed and of the number of the epoch that the
model counts itself; a sample's random numbers are those of its key, in NumPy's own words.
"""

from __future__ import annotations

import hashlib
import random
import struct
from array import array
from collections import Counter

import pytest
from plans import (
    EPOCH,
    VERSION_STEP,
    Collate,
    Drawing,
    Faults,
    Items,
    Many,
    Nesting,
    Plan,
    Planted,
    Shards,
    Sized,
    SizedStream,
    Source,
    Stream,
    Unsized,
    first_index,
)
from reference import cut, in_turns, outcome

from dataloader_rs import PyDataloader, default_collate
from dataloader_rs._shuffle import ShuffledOrder

np = pytest.importorskip("numpy")


class Ended:
    """In the place of an outcome: the epoch is over."""

    def __repr__(self) -> str:
        return "END"


END = Ended()


class Frozen:
    """The reference's view of a source in one of its versions; it is asked for (position, index)."""

    def __init__(self, model: Loader, epoch: int, version: int) -> None:
        self.model, self.epoch, self.version = model, epoch, version

    def __getitem__(self, place: tuple[int, int]):
        position, index = place
        source = self.model.source
        if index in source.faults.kinds:
            raise Planted(index)
        # A stream has fixed its length when it was opened.
        if index >= source.lengths[self.version] and not self.model.plan.is_stream:
            raise IndexError(index)
        value = index + VERSION_STEP * self.version
        return (value, drawn(0, self.model.rng_seed, self.epoch, position)) if self.model.plan.kind == "drawing" \
            else value


def drawn(purpose: int, rng_seed: int, epoch: int, position: int) -> int:
    """The first number that `sample_rng` draws for a sample (purpose 0) or a batch (1): this must never change."""
    key = hashlib.blake2b(struct.pack("<4Q", purpose, rng_seed, epoch, position), digest_size=16,
                          person=b"dataloader_rs 1").digest()
    return int(np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little"))).integers(2**62))


class Loader:
    """A loader and what the model knows of it."""

    def __init__(self, name: str, plan: Plan, calls: list) -> None:
        self.plan = plan
        faults = Faults(plan.errors, plan.same_object)
        self.source = Source(plan.length, faults, plan.jitter, calls)
        self.collate_faults = Faults(plan.collate_errors, plan.same_object)
        self.yield_faults = Faults(plan.yield_fault, plan.same_object)
        self.init_faults = Faults({"init": OSError})
        self.started, self.exited = [], []
        self.epoch = 0
        self.is_used_up = False
        # Of the dataset when the epoch was prepared that the next iter() starts.
        self.prepared: int | None = None
        self.iterators: list[Iterator] = []
        self.rng_seed = plan.seed ^ 5
        self.generator = self.new_generator()
        self.name = name
        self.loader: PyDataloader | None = self.new_loader()

    def __repr__(self) -> str:
        return self.name

    def new_generator(self):
        return {"random": random.Random, "numpy": np.random.default_rng}[self.plan.order](self.plan.seed) \
            if self.plan.order in ("random", "numpy") else None

    def new_loader(self) -> PyDataloader:
        plan = self.plan
        arguments = dict(plan.arguments)
        if plan.order == "seed":
            arguments.update(shuffle=True, seed=plan.seed)
        elif plan.order in ("random", "numpy"):
            arguments.update(shuffle=True, generator=self.new_generator())
        if plan.shape in ("sampler", "batch_sampler"):
            arguments[plan.shape] = self.new_iterable()
        if plan.collate != "none":
            arguments["collate_fn"] = default_collate if plan.collate == "default" else \
                Collate(self.collate_faults, plan.kind == "drawing")
        if plan.init != "none":
            arguments.update(worker_init_fn=self.on_start, worker_exit_fn=self.exited.append)
        return PyDataloader(self.new_dataset(), rng_seed=self.rng_seed, **arguments)

    def new_dataset(self):
        if self.plan.is_stream:
            return {"stream": Stream, "sized stream": SizedStream, "shards": Shards}[self.plan.shape](self.source)
        if self.plan.kind == "nesting":
            return Nesting(self.source, self.plan.length % 2)
        return {"items": Items, "many": Many, "drawing": Drawing}[self.plan.kind](self.source)

    def new_iterable(self):
        values, kind = self.plan.yields, self.plan.iterable
        if self.plan.shape == "batch_sampler":
            shapes = [list, tuple, lambda batch: array("q", batch), iter]
            # An iterator could be read in the first epoch only.
            number = 4 if self.plan.is_one_shot else 3
            values = [shapes[position % number](batch) for position, batch in enumerate(values)]
        elif kind == "array":
            return np.array(values, dtype=np.int32)
        if kind in ("unsized", "sized"):
            return (Unsized if kind == "unsized" else Sized)(values, self.yield_faults)
        return (value for value in values) if kind == "generator" else values

    def set_epoch(self, epoch: int) -> None:
        self.loader.set_epoch(epoch)
        self.epoch, self.prepared = epoch, None

    def on_start(self, worker_id: int) -> None:
        if self.plan.init == "fails" and worker_id == 0:
            self.init_faults.check("init")
        self.started.append(worker_id)

    # ---- what must come of it ----

    @property
    def is_across(self) -> bool:
        return bool(self.plan.arguments.get("across_epochs")) and self.plan.num_workers > 0 \
            and not self.plan.is_one_shot

    @property
    def iter_fails(self) -> bool:
        return self.plan.shape == "sampler" and bool(self.plan.yield_fault)

    def order(self, epoch: int) -> list[int]:
        """The indices of an epoch, in order. To be asked once for each epoch."""
        if self.plan.shape == "sampler":
            return [] if self.is_used_up else self.plan.yields
        length = self.source.lengths[-1]
        if self.plan.order == "seed":
            return list(ShuffledOrder(length, self.plan.seed, epoch))
        if self.plan.order == "random":
            return list(ShuffledOrder(length, self.generator.getrandbits(64), 0))
        if self.plan.order == "numpy":
            key = int(self.generator.integers(0, 2**64 - 1, endpoint=True, dtype="uint64"))
            return list(ShuffledOrder(length, key, 0))
        return list(range(length))

    def expected(self) -> tuple[list[Batch | Final], int]:
        """What the epoch must give that starts now, and how many batches it promises."""
        epoch, self.epoch = self.epoch, (self.epoch + 1) % 2**64
        plan = self.plan
        batch_size, drop_last = plan.batch_size, plan.drop_last
        last: list[Final] = []
        if plan.is_stream:
            lanes = [self.lane(epoch, range(lane, self.source.lengths[-1], plan.num_lanes), batch_size, drop_last)
                     for lane in range(plan.num_lanes)]
            outcomes = in_turns(lanes)
            ends = [number for number, outcome in enumerate(outcomes) if isinstance(outcome, Final)]
            outcomes = outcomes[:ends[0] + 1] if ends else outcomes
            promised = len(cut(range(self.source.lengths[-1]), batch_size, drop_last))
        else:
            if plan.shape == "batch_sampler":
                runs = [] if self.is_used_up else plan.yields
                for position in plan.yield_fault:
                    runs = runs[:position]
                    last = [Final(self.yield_faults, position)]
                places, first = [], 0
                for run in runs:
                    places.append(list(enumerate(run, first)))
                    first += len(run)
            else:
                places = cut(list(enumerate(self.order(epoch))), batch_size, drop_last)
            outcomes = [Batch(self, epoch, number, run) for number, run in enumerate(places)]
            promised = len(outcomes)
            outcomes += last
        # An epoch without a batch does not wait for workers, and ends with the error of its batch_sampler, if any.
        if plan.init == "fails" and (promised or plan.is_stream):
            return [Final(self.init_faults, "init")], promised
        for number, expected in enumerate(outcomes):
            expected.number = number
        return outcomes, promised

    def lane(self, epoch: int, indices: range, batch_size: int | None, drop_last: bool) -> list[Batch | Final]:
        """The batches of one iterator of a stream, and the error that ends it."""
        read, last = [], []
        for index in indices:
            if index in self.plan.errors:
                last = [Final(self.source.faults, index)]
                break
            read.append((-1, index))
        # What was read for the batch in whose place the error comes is lost.
        return [Batch(self, epoch, 0, run) for run in cut(read, batch_size, drop_last or bool(last))] + last

    def length(self) -> int | None:
        """What len(loader) must be; None for a TypeError."""
        plan = self.plan
        if plan.shape in ("sampler", "batch_sampler"):
            if plan.iterable in ("unsized", "generator"):
                return None
            num_items = len(plan.yields)
            if plan.shape == "batch_sampler":
                return num_items
        elif plan.shape in ("stream", "shards"):
            return None
        else:
            num_items = self.source.lengths[-1]
        return len(cut(range(num_items), plan.batch_size, plan.drop_last))


class Final:
    """An error that ends an epoch."""

    run: tuple = ()

    def __init__(self, faults: Faults, key: object) -> None:
        self.faults, self.key = faults, key

    def accepts(self, outcome: object, versions: range) -> bool:
        return self.faults.is_of(outcome, self.key)

    def __repr__(self) -> str:
        return f"error {self.key}, the end"


class Batch:
    """A batch that must come: the positions and indices of its items."""

    def __init__(self, loader: Loader, epoch: int, number: int, run: list[tuple[int, int]]) -> None:
        self.loader, self.epoch, self.number, self.run = loader, epoch, number, run

    def __repr__(self) -> str:
        return f"batch {self.number} of epoch {self.epoch}: {[index for _, index in self.run]}"

    def at(self, version: int) -> object:
        """What the sequential loader makes of it."""
        plan = self.loader.plan
        collate = {"none": None, "wrap": self.wrap, "default": default_collate}[plan.collate]
        single = plan.shape != "batch_sampler" and plan.batch_size is None
        return outcome(Frozen(self.loader, self.epoch, version), self.run, collate, single)

    def wrap(self, samples: object) -> tuple:
        if first_index(samples) in self.loader.plan.collate_errors:
            raise Planted(("collate", first_index(samples)))
        draws = self.loader.plan.kind == "drawing"
        return "collated", samples, drawn(1, self.loader.rng_seed, self.epoch, self.number) if draws else None

    def accepts(self, outcome: object, versions: range) -> bool:
        """Whether the outcome can be this batch; items may have been read in any of the versions of the dataset."""
        wanted = [self.at(version) for version in versions]
        if any(self.is_same(outcome, one) for one in wanted):
            return True
        if len(versions) == 1:
            return False
        if isinstance(outcome, BaseException):
            return any(self.is_same(outcome, one) for version in versions for place in self.run
                       for one in [Batch(self.loader, self.epoch, self.number, [place]).at(version)])
        # A mixture of what the items are in each version.
        with_value = [one for one in map(plain, wanted) if not isinstance(one, BaseException)]
        got = plain(outcome)
        return any(unversioned(got) == unversioned(one) for one in with_value) and values(got) <= {
            index + VERSION_STEP * version for _, index in self.run for version in versions}

    def is_same(self, outcome: object, wanted: object) -> bool:
        if isinstance(wanted, Planted):
            if isinstance(wanted.key, tuple):
                return self.loader.collate_faults.is_of(outcome, wanted.key[1])
            return self.loader.source.faults.is_of(outcome, wanted.key)
        if isinstance(wanted, BaseException) or isinstance(outcome, BaseException):
            return type(outcome) is type(wanted) is IndexError and outcome.args == wanted.args
        return plain(outcome) == plain(wanted)


def plain(batch: object) -> object:
    """The same with a list and its dtype for each array, which can be compared."""
    if isinstance(batch, np.ndarray):
        return [*batch.tolist(), batch.dtype.str]
    if isinstance(batch, list | tuple):
        return type(batch)(map(plain, batch))
    return batch


def unversioned(batch: object) -> object:
    if isinstance(batch, list | tuple):
        return type(batch)(map(unversioned, batch))
    return batch % VERSION_STEP if type(batch) is int and batch < 2**32 else batch


def values(batch: object) -> set[int]:
    if isinstance(batch, list | tuple):
        return set().union(*map(values, batch))
    return {batch} if type(batch) is int and batch < 2**32 else set()


class Iterator:
    """An iterator and what must still come from it."""

    def __init__(self, loader: Loader, token: int, oldest: int) -> None:
        self.loader, self.token, self.oldest = loader, token, oldest
        self.pending, self.promised = loader.expected()
        self.batches = [batch for batch in self.pending if isinstance(batch, Batch)]
        self.failed: list[Batch] = []
        self.taken = 0
        self.ended = self.closed = False
        # Other epochs that could have had the same outcomes.
        self.alternatives: list[Iterator] = []
        self.iterator: object = None

    def __repr__(self) -> str:
        return f"iterator{self.token}"

    @property
    def versions(self) -> range:
        return range(self.oldest, self.loader.source.version + 1)

    def take(self) -> object:
        """One next(). Any thread may call it; the outcome is judged on the main thread."""
        try:
            return next(self.iterator)
        except StopIteration:
            return END
        except BaseException as error:
            return error

    def judge(self, outcome: object) -> Batch | Final | None:
        """Hold the next outcome of a single consumer against the model."""
        if outcome is END:
            assert not self.pending or self.ended, f"the epoch ended before {self.pending}"
            self.ended = True
            return None
        assert not self.ended, f"after the end of the epoch came {outcome!r}"
        if self.closed and type(outcome) is RuntimeError and "was closed" in str(outcome):
            assert self.pending or self.loader.plan.is_stream or self.loader.plan.shape == "batch_sampler"
            return None
        return self.match(outcome)

    def match(self, outcome: object) -> Batch | Final:
        if isinstance(outcome, AssertionError):
            raise outcome
        assert self.pending, f"after the last batch came {outcome!r}"
        candidates = self.pending
        if self.loader.plan.in_order:
            candidates = self.pending[:1]
        elif len(self.pending) > 1:
            candidates = [batch for batch in self.pending if isinstance(batch, Batch)]
        for batch in candidates:
            if batch.accepts(outcome, self.versions):
                break
        else:
            raise AssertionError(f"got {outcome!r} {getattr(outcome, '__notes__', '')}, due was {candidates}, like "
                                 f"{[batch.at(self.oldest) for batch in candidates if isinstance(batch, Batch)]}")
        self.pending.remove(batch)
        if isinstance(batch, Final):
            self.ended = self.loader.plan.is_stream or batch.key == "init"
            return batch
        self.taken += 1
        if isinstance(outcome, BaseException):
            self.failed.append(batch)
        return batch

    def check_note(self, outcome: object, matched: Batch | Final | None, num_taken: int) -> None:
        """An error that has just come has one note, which says where it comes from."""
        if matched is None or not isinstance(outcome, BaseException):
            return
        notes = [note for note in getattr(outcome, "__notes__", []) if note.startswith("dataloader_rs: ")]
        if isinstance(matched, Final) and matched.faults is self.loader.yield_faults:
            assert not notes
        elif isinstance(matched, Final) and matched.key == "init":
            assert len(notes) == 1 and "raised by worker_init_fn, in worker 0" in notes[0], notes
        else:
            assert len(notes) == 1 and " in " in notes[0], notes
            if self.loader.plan.in_order and self.loader.plan.num_lanes == 1:
                assert f"batch {num_taken}" in notes[0], (num_taken, notes)

    def check_length(self) -> None:
        """len() is what is still to come, or a TypeError until that is known."""
        if self.iterator is None or self.closed:
            return
        plan = self.loader.plan
        left = 0 if self.ended else max(self.promised - self.taken, 0)
        try:
            got = len(self.iterator)
        except TypeError:
            assert not self.ended
            assert plan.shape in ("batch_sampler", "stream", "shards"), "the length is known"
            return
        if plan.shape == "batch_sampler" and not self.ended and plan.init != "fails":
            left = sum(isinstance(batch, Batch) for batch in self.pending)
        elif plan.shape in ("stream", "shards"):
            assert self.ended, "the length is not known"
        assert got == left, f"len is {got}, not {left}"

    def check_calls(self, calls: Counter, is_over: bool = False) -> None:
        """What was asked for is what it had to be for this epoch, or for one that it may have been."""
        problem = None
        for model in [self, *self.alternatives]:
            try:
                model.check_own_calls(calls, is_over)
            except AssertionError as error:
                problem = error
            else:
                return
        raise problem

    def check_own_calls(self, calls: Counter, is_over: bool) -> None:
        """Each index was asked for as often as it had to be, and workers went no further than they may."""
        loader = self.loader
        if loader.is_across or loader.plan.init == "fails" or loader.plan.num_lanes > 1:
            return
        reach = len(self.batches) if self.ended and is_over else self.taken + loader.plan.capacity
        allowed = Counter(index for batch in self.batches[:reach] for _, index in batch.run)
        if loader.plan.is_stream:
            # Of the batch that failed, and of one that was dropped, samples were read, too.
            size = loader.plan.batch_size or 1
            allowed = Counter(range(reach * size + (size if self.ended else 0)))
        assert calls <= allowed, f"asked for {calls - allowed} beside what may be asked for"
        if self.loader.plan.in_order or (self.ended and not self.pending):
            failed = set(map(id, self.failed))
            waiting = set(map(id, self.pending))
            needed = Counter(index for batch in self.batches if id(batch) not in failed | waiting
                             for _, index in batch.run)
            assert needed <= calls, f"did not ask for {needed - calls}"


def start_iterator(loader: Loader, token: int) -> Iterator | None:
    """iter(loader); None if it raised what it had to."""
    now = loader.source.version
    if loader.iter_fails:
        for position, kind in loader.plan.yield_fault.items():
            try:
                iter(loader.loader)
            except BaseException as error:
                assert loader.yield_faults.is_of(error, position), error
                return None
            raise AssertionError(f"the {kind} of the sampler was lost")
    oldest = now
    if loader.is_across:
        oldest = now if loader.prepared is None else loader.prepared
        loader.prepared = now
    model = Iterator(loader, token, oldest)
    EPOCH.set(token)
    model.iterator = iter(loader.loader)
    loader.is_used_up = loader.plan.is_one_shot
    loader.iterators.append(model)
    return model
