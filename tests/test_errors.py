"""Errors of user code: the object itself, in the place of its batch, with one note; the next batch goes on."""

import asyncio
import io
import re
import subprocess
import threading
import traceback
import urllib.error

import pytest
from conftest import eventually, is_parked
from reference import drained
from toy_datasets import FailingDataset, GatedDataset, Ids

from dataloader_rs import PyDataloader, PyDataset


class TwoArguments(Exception):
    def __init__(self, a, b):
        super().__init__(a, b)
        self.a = a
        self.b = b


class NeedsKey(Exception):
    """Cannot be made again from its text."""

    def __init__(self, key):
        super().__init__(key)
        self.value = {("only", "key"): 1}[key]


class Fatal(BaseException):
    pass


class Group(BaseExceptionGroup):
    pass


class BrokenLength:
    """A sampler that raises `error` when it is asked for its length."""

    def __init__(self, error):
        self.error = error

    def __len__(self):
        raise self.error

    def __iter__(self):
        return iter([0, 1])


class OfLoaders(FailingDataset):
    """Each item is the first batch of a loader of its own."""

    def __getitem__(self, index):
        return next(iter(PyDataloader(FailingDataset(2, self.errors))))


def gone():
    error = urllib.error.HTTPError("http://example.invalid", 404, "gone", None, io.BytesIO())
    error.close()  # of what is not closed, CPython 3.14 warns
    return error


ODD_ERRORS = [
    lambda: TwoArguments(3, "x"),
    lambda: NeedsKey(("only", "key")),
    lambda: subprocess.CalledProcessError(1, "cmd"),
    lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    lambda: gone(),
    lambda: KeyError("key"),
    lambda: OSError(2, "No such file or directory", "a.png"),
    lambda: MemoryError("mine"),
    lambda: RecursionError(),
    lambda: StopAsyncIteration(1),
    lambda: ExceptionGroup("several", [ValueError(1)]),
    lambda: asyncio.CancelledError("task"),
    lambda: KeyboardInterrupt("ctrl-c"),
    lambda: SystemExit(3),
    lambda: GeneratorExit(),
    lambda: Fatal("fatal", 1),
    lambda: Group("all", [Fatal()]),
]


@pytest.fixture(params=[1, 3])
def items_in_parallel(request):
    return request.param


def outcome(loader):
    """What the first batch of an epoch raises."""
    with pytest.raises(BaseException) as caught:
        next(iter(loader))
    return caught.value


def our_notes(error):
    return [note for note in error.__notes__ if note.startswith("dataloader_rs: ")]


def raise_(error):
    raise error


# ---- the object itself ----

@pytest.mark.slow
@pytest.mark.parametrize("make", ODD_ERRORS, ids=lambda make: type(make()).__name__)
def test_error_comes_out_as_the_object_that_was_raised(make, num_workers, items_in_parallel):
    """B01: same object, type, args and attributes, whatever its constructor needs, in the third of four batches."""
    error = make()
    args, text, attributes = error.args, str(error), dict(vars(error))
    dataset = FailingDataset(8, {5: error})
    iterator = iter(PyDataloader(dataset, 2, num_workers=num_workers, items_in_parallel=items_in_parallel))
    assert [next(iterator), next(iterator)] == [[0, 1], [2, 3]]
    with pytest.raises(BaseException) as caught:
        next(iterator)
    assert caught.value is error
    assert error.args == args
    assert error.args is args or error.args == ()
    assert str(error) == text
    assert {name: value for name, value in vars(error).items() if name != "__notes__"} == attributes
    assert next(iterator) == [6, 7]
    with pytest.raises(StopIteration):
        next(iterator)


def test_traceback_ends_at_the_line_of_the_dataset(num_workers, items_in_parallel):
    """The last line of the traceback is the one that raised, with the calls that led to it."""
    class Deep(Ids):
        def __getitem__(self, index):
            return self.read(index)

        def read(self, index):
            raise ValueError("deep")  # the line of the dataset

    error = outcome(PyDataloader(Deep(4), 2, num_workers=num_workers, items_in_parallel=items_in_parallel))
    frames = traceback.extract_tb(error.__traceback__)
    assert [frame.name for frame in frames[-2:]] == ["__getitem__", "read"]
    assert frames[-1].filename == __file__
    assert frames[-1].line == 'raise ValueError("deep")  # the line of the dataset'
    assert frames[0].name == "outcome"


def test_cause_and_context_are_those_of_the_dataset(num_workers, items_in_parallel):
    """What an error came from in user code stays; what the consumer happens to handle is not added."""
    class Chained(Ids):
        def __getitem__(self, index):
            try:
                {}[index]
            except KeyError as error:
                if index == 0:
                    raise ValueError("from") from error
                raise ValueError("during")  # noqa: B904

    iterator = iter(PyDataloader(Chained(2), num_workers=num_workers, items_in_parallel=items_in_parallel))
    try:
        raise OSError("the consumer's own")
    except OSError:
        with pytest.raises(ValueError, match="from") as first:
            next(iterator)
        with pytest.raises(ValueError, match="during") as second:
            next(iterator)
    assert type(first.value.__cause__) is type(second.value.__context__) is KeyError
    assert second.value.__cause__ is None
    if num_workers > 0 or items_in_parallel > 1:  # the calling thread has a context of its own
        assert second.value.__context__.__context__ is None


# ---- in its place ----

def test_index_error_is_not_the_end(num_workers, items_in_parallel):
    """B03: an IndexError from a bug in the dataset comes out after exactly the batches before it."""
    error = IndexError("list index out of range")
    loader = PyDataloader(FailingDataset(5, {2: error}), num_workers=num_workers, items_in_parallel=items_in_parallel)
    seen = []
    with pytest.raises(IndexError) as caught:
        for batch in loader:
            seen.append(batch)
    assert caught.value is error
    assert seen == [[0], [1]]
    with pytest.raises(IndexError):
        list(loader)


def test_damaged_sample_costs_one_batch(num_workers, items_in_parallel):
    """B05: the following batches come, ``len(it)`` counts a failed batch as delivered, the next epoch is normal."""
    error = ValueError("damaged")
    dataset = FailingDataset(16, {5: error})
    loader = PyDataloader(dataset, 4, num_workers=num_workers, items_in_parallel=items_in_parallel)
    iterator = iter(loader)
    lengths = [len(iterator)]
    outcomes = []
    for _ in range(4):
        try:
            outcomes.append(next(iterator))
        except ValueError as caught:
            outcomes.append(caught)
        lengths.append(len(iterator))
    assert outcomes == [[0, 1, 2, 3], error, [8, 9, 10, 11], [12, 13, 14, 15]]
    assert lengths == [4, 3, 2, 1, 0]
    with pytest.raises(StopIteration):
        next(iterator)
    dataset.errors.clear()
    assert sum(loader, []) == list(range(16))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_errors_stand_in_the_places_of_their_batches(size, num_workers, items_in_parallel):
    """For every pair of damaged samples of six: batches and errors come in the order of the epoch."""
    for damaged in [(first, second) for second in range(6) for first in range(second)]:
        dataset = FailingDataset(6, {index: ValueError(index) for index in damaged})
        loader = PyDataloader(dataset, size, num_workers=num_workers, items_in_parallel=items_in_parallel)
        expected = []
        for start in range(0, 6, size):
            run = range(start, start + size)
            failed = [dataset.errors[index] for index in run if index in damaged]
            expected.append(failed[0] if failed else list(run))
        outcomes = drained(iter(loader))
        assert outcomes == expected
        pairs = zip(outcomes, expected, strict=True)
        assert all(got is wanted for got, wanted in pairs if isinstance(wanted, ValueError))


def test_epoch_of_errors_only_ends_as_any_other(num_workers, items_in_parallel):
    """Every batch fails, each with an error of its own; then comes the end, and the next epoch."""
    dataset = FailingDataset(6, {index: ValueError(index) for index in range(6)})
    loader = PyDataloader(dataset, num_workers=num_workers, items_in_parallel=items_in_parallel)
    for _ in range(2):
        assert drained(iter(loader)) == list(dataset.errors.values())


def test_error_stays_with_its_iterator(num_workers):
    """Another iterator of the same loader, and one that was dropped with an error waiting, know nothing of it."""
    dataset = FailingDataset(4, {1: ValueError("once")})
    loader = PyDataloader(dataset, num_workers=num_workers)
    failing, dropped = iter(loader), iter(loader)
    assert next(failing) == next(dropped) == [0]
    with pytest.raises(ValueError, match="once"):
        next(failing)
    del dropped
    dataset.errors.clear()
    assert list(failing) == [[2], [3]]
    assert list(loader) == [[0], [1], [2], [3]]


# ---- the note ----

def test_note_names_the_index_and_the_worker(num_workers, items_in_parallel):
    """B07: one entry in ``__notes__`` with the index that failed, its batch and its worker; text and args stay."""
    error = OSError("bad file")
    loader = PyDataloader(FailingDataset(100, {37: error}), 10, shuffle=True, seed=1, num_workers=num_workers,
                          items_in_parallel=items_in_parallel)
    batch, position = divmod(sum(PyDataloader(Ids(100), 10, shuffle=True, seed=1), []).index(37), 10)
    outcomes = drained(iter(loader))
    assert outcomes.index(error) == batch
    assert (error.args, str(error)) == (("bad file",), "bad file")
    [note] = error.__notes__
    assert f"index 37 (position {position} of batch {batch})" in note
    if num_workers == 0 and items_in_parallel == 1:
        assert note.endswith("in the calling thread")
    else:
        worker = int(re.search(r"in worker (\d+)$", note)[1])
        assert worker < max(num_workers, 1) * items_in_parallel


def test_note_is_in_what_python_prints(num_workers):
    """B07: an uncaught error shows where it came from."""
    error = outcome(PyDataloader(FailingDataset(3, {0: ValueError("bad")}), num_workers=num_workers))
    assert re.search(r"ValueError: bad\ndataloader_rs: .*index 0 ", "".join(traceback.format_exception(error)))


def test_note_with_a_sampler_names_the_index_not_the_position(num_workers, items_in_parallel):
    """B07: repeats and order are the sampler's; the index is what the dataset was asked for."""
    error = ValueError("bad")
    dataset = FailingDataset(9, {7: error})
    loader = PyDataloader(dataset, 3, sampler=[1, 1, 1, 0, 2**70, 7], num_workers=num_workers,
                          items_in_parallel=items_in_parallel)
    assert drained(iter(loader)) == [[1, 1, 1], error]
    assert "index 7 (position 2 of batch 1)" in error.__notes__[0]


def test_note_is_replaced_when_the_same_object_is_raised_again(num_workers, items_in_parallel):
    """Some datasets raise one object again and again: it has one note of ours, the newest, beside the user's own."""
    error = ValueError("again")
    error.add_note("the user's own")
    for _ in range(2):
        # One at a time: Python itself does not expect two threads to raise one object at once.
        dataset = GatedFailures(9, (4, 8), {index: error for index in (1, 4, 8)})
        iterator = iter(PyDataloader(dataset, num_workers=num_workers, items_in_parallel=items_in_parallel))
        for index in range(9):
            if index in dataset.gates:
                dataset.open(index)
            if index not in dataset.errors:
                assert next(iterator) == [index]
                continue
            with pytest.raises(ValueError) as caught:
                next(iterator)
            assert caught.value is error
            assert f"index {index} " in error.__notes__[-1]
            assert error.__notes__[:-1] == ["the user's own"]


def test_note_through_nested_loaders_names_one_place(num_workers):
    """An error that passes through two loaders has one note, not a pile of them."""
    error = ValueError("inner")
    assert outcome(PyDataloader(OfLoaders(2, {0: error}), 2, num_workers=num_workers)) is error
    assert len(our_notes(error)) == 1


def test_long_batch_has_a_short_note(num_workers):
    """B07: the indices of a batch that failed as a whole are listed, up to a hundred of them."""
    loader = PyDataloader(Ids(1000), 1000, num_workers=num_workers, collate_fn=lambda samples: 1 / 0)
    [note] = outcome(loader).__notes__
    assert "indices [0, 1, 2, " in note
    assert "99, ... 1000 in all]" in note
    assert len(note) < 600


class Slotted(Exception):
    __slots__ = ("field",)


class NoNotes(Exception):
    def add_note(self, note):
        raise RuntimeError("no notes here")


class InterruptedNotes(Exception):
    def add_note(self, note):
        raise KeyboardInterrupt


class NotesAreText(Exception):
    __notes__ = "text"


class NotesAreATuple(Exception):
    def __init__(self, *args):
        super().__init__(*args)
        self.__notes__ = ("a", "b")


class NotesCannotBeRead(Exception):
    @property
    def __notes__(self):
        raise RuntimeError("no notes here")


class NotesAreOdd(Exception):
    def __init__(self, *args):
        super().__init__(*args)
        self.__notes__ = [1, None, b"x"]


class Frozen(Exception):
    def __setattr__(self, name, value):
        raise AttributeError(f"frozen: {name}")


@pytest.mark.parametrize("kind", [Slotted, NoNotes, NotesAreText, NotesAreATuple, NotesCannotBeRead, NotesAreOdd,
                                  Frozen])
def test_note_that_cannot_be_added_does_not_hide_the_error(kind, num_workers, items_in_parallel):
    """Decision 15: the error is worth more than its note, and the next batch goes on."""
    error = kind("the error")
    dataset = FailingDataset(4, {0: error})
    loader = PyDataloader(dataset, 2, num_workers=num_workers, items_in_parallel=items_in_parallel)
    iterator = iter(loader)
    with pytest.raises(kind) as caught:
        next(iterator)
    assert caught.value is error
    assert error.args == ("the error",)
    assert error.__context__ is None
    assert next(iterator) == [2, 3]
    if kind is Slotted:
        assert len(our_notes(error)) == 1
    if kind is NotesAreOdd:
        assert error.__notes__[:3] == [1, None, b"x"]


def test_interrupt_while_the_note_is_added_is_not_lost_nor_is_the_error(num_workers, items_in_parallel):
    """Ctrl-C may come just there: it comes out, caused by the error of the batch, and the next batch goes on."""
    error = InterruptedNotes("the error")
    dataset = FailingDataset(4, {0: error})
    loader = PyDataloader(dataset, 2, num_workers=num_workers, items_in_parallel=items_in_parallel)
    interrupt, batch = drained(iter(loader))
    assert type(interrupt) is KeyboardInterrupt
    assert interrupt.__cause__ is error
    assert batch == [2, 3]


# ---- StopIteration ----

class Ended(StopIteration):
    pass


@pytest.mark.parametrize("kind", [StopIteration, Ended])
def test_stop_iteration_becomes_a_runtime_error(kind, num_workers, items_in_parallel):
    """Decision 15: ``next(it)`` on an empty iterator in a dataset must not end the epoch; the cause is the object."""
    error = kind("not the end")
    dataset = FailingDataset(6, {2: error})
    loader = PyDataloader(dataset, 2, num_workers=num_workers, items_in_parallel=items_in_parallel)
    for _ in range(2):
        first, failed, last = drained(iter(loader))
        assert (first, last) == ([0, 1], [4, 5])
        assert type(failed) is RuntimeError
        assert failed.__cause__ is error
        assert len(our_notes(failed)) == 1
        assert "index 2 " in failed.__notes__[0]


def test_stop_iteration_from_collate_fn_becomes_a_runtime_error(num_workers, items_in_parallel):
    """Decision 15: the same for the batch as a whole."""
    error = StopIteration()
    loader = PyDataloader(Ids(4), 2, num_workers=num_workers, items_in_parallel=items_in_parallel,
                          collate_fn=lambda samples: raise_(error) if 0 in samples else samples)
    failed, batch = drained(iter(loader))
    assert type(failed) is RuntimeError
    assert failed.__cause__ is error
    assert batch == [2, 3]


# ---- BaseExceptions ----

BASE_EXCEPTIONS = """
    import sys
    from toy_datasets import FailingDataset
    from dataloader_rs import PyDataloader

    class Fatal(BaseException):
        pass

    for num_workers in (0, 1, 4):
        for items_in_parallel in (1, 3):
            for error in (SystemExit(3), KeyboardInterrupt(), GeneratorExit(), Fatal()):
                for collate_fn in (None, lambda samples: samples):
                    loader = PyDataloader(FailingDataset(4, {1: error}), 2, num_workers=num_workers,
                                          items_in_parallel=items_in_parallel, collate_fn=collate_fn)
                    iterator = iter(loader)
                    try:
                        next(iterator)
                    except BaseException as caught:
                        assert caught is error, caught
                    else:
                        raise AssertionError("nothing came out")
                    assert next(iterator) == [2, 3]
    print("done")
"""


def test_base_exceptions_come_out_of_next_and_print_nothing(run_script):
    """SystemExit and KeyboardInterrupt of a dataset end no thread, and nothing is written to standard error."""
    assert run_script(BASE_EXCEPTIONS).stdout == "done\n"


@pytest.mark.parametrize("workers", [0, 2])
def test_uncaught_system_exit_of_a_dataset_ends_the_program(workers, run_script):
    """As if the dataset had been called in the loop itself: its status, and nothing printed."""
    run_script(f"""
        from toy_datasets import FailingDataset
        from dataloader_rs import PyDataloader
        for batch in PyDataloader(FailingDataset(4, {{1: SystemExit(3)}}), num_workers={workers}):
            print(batch)
    """, status=3)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_base_exception_in_collate_fn_comes_out_of_next(kind, num_workers, items_in_parallel):
    """And no thread hook of `threading` is told of it."""
    error = kind()
    told = []
    hook, threading.excepthook = threading.excepthook, told.append
    try:
        loader = PyDataloader(Ids(4), 2, num_workers=num_workers, items_in_parallel=items_in_parallel,
                              collate_fn=lambda samples: raise_(error) if 0 in samples else samples)
        assert drained(iter(loader)) == [error, [2, 3]]
    finally:
        threading.excepthook = hook
    assert told == []


# ---- items in parallel ----

class GatedFailures(GatedDataset):
    """Raises ``errors[i]`` once the gate of item i is open."""

    def __init__(self, length, closed, errors):
        super().__init__(length, closed)
        self.errors = errors
        self.threads = {}

    def __getitem__(self, index):
        self.threads[index] = threading.get_native_id()  # before it counts as started
        return super().__getitem__(index)

    def fetch(self, index):
        super().fetch(index)
        if index in self.errors:
            raise self.errors[index]
        return index

    def wait_until_left(self, running):
        with self.changed:
            assert self.changed.wait_for(lambda: self.running <= running, 20)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)])
@pytest.mark.parametrize("workers", [0, 1, 4])
def test_lowest_position_wins(order, workers):
    """Decision 15: of several items of one batch that fail, the first in the batch is reported, whenever it failed."""
    errors = {index: ValueError(index) for index in (0, 1, 2)}
    dataset = GatedFailures(3, (0, 1, 2), errors)
    loader = PyDataloader(dataset, 3, num_workers=workers, items_in_parallel=3)
    outcomes = []
    consumer = threading.Thread(target=lambda: outcomes.extend(drained(iter(loader))))
    consumer.start()
    dataset.wait_until_started((0, 1, 2))
    for left, index in zip((2, 1, 0), order, strict=True):
        dataset.open(index)
        dataset.wait_until_left(left)
    consumer.join()
    assert outcomes == [errors[0]]
    assert "index 0 (position 0 of batch 0)" in errors[0].__notes__[0]
    assert not hasattr(errors[1], "__notes__")


@pytest.mark.parametrize("workers", [0, 1])
def test_no_further_item_of_a_failed_batch_is_started(workers):
    """Decision 15: what is under way finishes, the rest of the batch is left, and the next batch is complete."""
    error = ValueError("first")
    dataset = GatedFailures(12, (0, 1, 2), {1: error})
    loader = PyDataloader(dataset, 6, num_workers=workers, items_in_parallel=3)
    outcomes = []
    consumer = threading.Thread(target=lambda: outcomes.extend(drained(iter(loader))))
    consumer.start()
    dataset.wait_until_started((0, 1, 2))
    dataset.open(1)
    # Item 1 has failed while 0 and 2 are held, once the thread that had it finds nothing more to start.
    assert eventually(lambda: is_parked(dataset.threads[1]))
    dataset.open(0, 2)
    consumer.join()
    assert outcomes == [error, [6, 7, 8, 9, 10, 11]]
    assert sorted(dataset.started) == [0, 1, 2, 6, 7, 8, 9, 10, 11]


def test_items_after_a_failed_one_are_not_fetched(num_workers):
    """The same for items that are fetched one after the other."""
    dataset = GatedFailures(8, (), {1: ValueError("bad")})
    list_of_outcomes = drained(iter(PyDataloader(dataset, 4, num_workers=num_workers)))
    assert list_of_outcomes == [dataset.errors[1], [4, 5, 6, 7]]
    assert sorted(dataset.started) == [0, 1, 4, 5, 6, 7]


# ---- collate_fn and __len__ ----

def test_error_of_collate_fn_is_an_error_of_its_batch(num_workers, items_in_parallel):
    """B07: the object itself, a note with the indices of the batch, and the next batch goes on."""
    error = TypeError("cannot stack")

    def collate(samples):
        if 4 in samples:
            raise error
        return sum(samples)

    loader = PyDataloader(Ids(8), 3, num_workers=num_workers, items_in_parallel=items_in_parallel, collate_fn=collate)
    iterator = iter(loader)
    assert next(iterator) == 3
    with pytest.raises(TypeError) as caught:
        next(iterator)
    assert caught.value is error
    assert traceback.extract_tb(error.__traceback__)[-1].name == "collate"
    [note] = error.__notes__
    assert "indices [3, 4, 5] (batch 1)" in note
    assert ("in worker" in note) == (num_workers > 0)
    assert next(iterator) == 13


def test_collate_fn_is_not_called_for_a_failed_batch(num_workers, items_in_parallel):
    """There is no list of samples to call it with."""
    seen = []
    loader = PyDataloader(FailingDataset(6, {2: ValueError("bad")}), 2, num_workers=num_workers,
                          items_in_parallel=items_in_parallel, collate_fn=seen.append)
    assert [outcome is None for outcome in drained(iter(loader))] == [True, False, True]
    assert sorted(seen) == [[0, 1], [4, 5]]


@pytest.mark.parametrize("kind", [ValueError, KeyError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("shuffle", [False, True])
def test_error_of_len_comes_from_iter(kind, shuffle, num_workers):
    """A ``__len__`` that raises makes ``iter(loader)`` raise, never an empty epoch; then the loader is usable."""
    class Broken(Ids):
        error = None

        def __len__(self):
            return self.length if self.error is None else raise_(self.error)

    dataset = Broken(3)
    loader = PyDataloader(dataset, num_workers=num_workers, shuffle=shuffle)
    dataset.error = kind("no length")
    for attempt in (iter, len, list):
        with pytest.raises(kind) as caught:
            attempt(loader)
        assert caught.value is dataset.error
    dataset.error = None
    assert sorted(sum(loader, [])) == [0, 1, 2]


def test_stop_iteration_from_len_is_a_runtime_error():
    """Decision 15: let out of ``iter(loader)``, it would end a ``yield from`` or a chain of loaders in silence."""
    error = StopIteration()

    class Broken(Ids):
        def __len__(self):
            raise error

    with pytest.raises(RuntimeError) as caught:
        iter(PyDataloader(Broken(3)))
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("kind", [ValueError, KeyError])
def test_error_of_a_samplers_len_comes_from_iter(kind, num_workers):
    """A sampler whose ``__len__`` is broken is not taken for one that has none."""
    sampler = BrokenLength(kind("no length"))
    loader = PyDataloader(Ids(3), sampler=sampler, num_workers=num_workers)
    for attempt in (iter, len):
        with pytest.raises(kind) as caught:
            attempt(loader)
        assert caught.value is sampler.error


# ---- samples that look like errors ----

def test_exceptions_and_none_may_be_samples(num_workers, items_in_parallel):
    """An exception that is returned, its class, None and NotImplemented are samples like any other."""
    samples = [ValueError("a sample"), StopIteration, None, NotImplemented, StopIteration(), Fatal()]
    loader = PyDataloader(PyDataset.of(samples), 4, num_workers=num_workers, items_in_parallel=items_in_parallel)
    delivered = sum(loader, [])
    assert all(got is given for got, given in zip(delivered, samples, strict=True))
    assert not hasattr(samples[0], "__notes__")


@pytest.mark.parametrize("batch", [None, ValueError("a batch"), StopIteration(), StopIteration, False, ...], ids=repr)
def test_exceptions_and_none_may_be_batches(batch, num_workers, items_in_parallel):
    """What ``collate_fn`` returns is delivered, whatever it is; it ends no epoch."""
    loader = PyDataloader(Ids(5), 2, num_workers=num_workers, items_in_parallel=items_in_parallel,
                          collate_fn=lambda samples: batch)
    delivered = list(loader)
    assert len(delivered) == 3
    assert all(got is batch for got in delivered)


def test_note_of_an_item_in_a_huge_batch_costs_nothing(num_workers):
    """B07: one index is named without listing the others. Fails (for want of memory) on one that lists them."""
    error = ValueError("first")
    loader = PyDataloader(FailingDataset(1 << 40, {0: error}), 1 << 40, num_workers=num_workers)
    assert outcome(loader) is error
    assert "index 0 (position 0 of batch 0)" in our_notes(error)[0]
