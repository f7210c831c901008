"""How an exception of user code comes out of ``next()``: the object itself, with one note on where it comes from."""

from __future__ import annotations

import reprlib
from array import array
from collections import deque

NOTE_START = "dataloader_rs: "

# Characters of a value, or of the name of a type, that a message has at most.
MOST_SHOWN = 200

# What is shown item by item; all else by its repr.
TAKEN_APART = (str, int, list, tuple, dict, set, frozenset, array, deque)

_name_of = type.__dict__["__name__"].__get__


class BatchTimeoutError(TimeoutError, RuntimeError):
    """No batch came within the `timeout` of the loader. The next ``next()`` goes on waiting for it."""

    # What users know it by.
    __module__ = "dataloader_rs"


def explain(error: BaseException, indices: list[int], num_items: int, position: int, batch: int,
            worker: int) -> None:
    """Put a note on the exception of a failed batch.

    Parameters
    ----------
    error : BaseException
        What user code raised.
    indices : list of int
        The index of the item that failed; or, if the batch failed as a whole, those of its first items.
    num_items : int
        Of the batch.
    position : int
        Of the item that failed, in the batch; -1 if the batch failed as a whole.
    batch : int
        Its number in the epoch, from 0.
    worker : int
        Number of the worker, -1 for the calling thread.
    """
    _set_note(error, f"raised for {origin(batch, indices, num_items, position)}, in {_thread(worker)}")


def explain_stream(error: BaseException, batch: int, worker: int, samples_lost: int) -> None:
    """Put a note on the exception of a failed batch of a stream.

    Parameters
    ----------
    error : BaseException
    batch : int
        Its number in the epoch, from 0.
    worker : int
        Number of the worker, -1 for the calling thread.
    samples_lost : int
        That the stream had given for this batch before it raised the exception; -1 if something else did.
    """
    note = f"raised for batch {batch} of the stream, in {_thread(worker)}"
    if samples_lost >= 0:
        note += f"; {samples_lost} samples that were read for it are lost, and the epoch ends here"
    _set_note(error, note)


def explain_start(error: BaseException, worker: int) -> None:
    """Put a note on what ``worker_init_fn`` raised on a worker."""
    _set_note(error, f"raised by worker_init_fn, in {_thread(worker)}")


def not_the_end(error: BaseException) -> BaseException:
    """`error`, or a RuntimeError caused by it if it is a StopIteration, which would seem to end the epoch."""
    # By its type: a class may answer anything to isinstance().
    if not issubclass(type(error), StopIteration):
        return error
    result = RuntimeError("a dataset, sampler, collate_fn or worker_init_fn raised StopIteration")
    result.__cause__ = error
    return result


def interrupted(error: BaseException) -> RuntimeError:
    """What ends an epoch whose sampler was interrupted by `error`."""
    result = RuntimeError("the sampler was interrupted while it was drawn from: the rest of the epoch is lost")
    result.__cause__ = error
    return result


def origin(batch: int, indices: list[int], num_items: int, position: int) -> str:
    """Which item of a batch, or, if `position` is -1, which items, in words; see `explain`."""
    if position >= 0:
        return f"index {indices[0]} (position {position} of batch {batch})"
    listed = ", ".join(map(str, indices))
    more = f", ... {num_items} in all" if num_items > len(indices) else ""
    return f"indices [{listed}{more}] (batch {batch})"


def _thread(worker: int) -> str:
    return f"worker {worker}" if worker >= 0 else "the calling thread"


def _set_note(error: BaseException, note: str) -> None:
    """Add the note, in place of an earlier one of ours: the same object may be raised again and again."""
    try:
        notes = getattr(error, "__notes__", None)
        if isinstance(notes, list):
            notes[:] = [old for old in notes if not (isinstance(old, str) and old.startswith(NOTE_START))]
        error.add_note(NOTE_START + note)
    except Exception:
        # An exception that takes no notes is worth more than the note.
        pass


class _Short(reprlib.Repr):
    def repr1(self, x: object, level: int) -> str:
        # By the type itself: CPython before 3.12 goes by its name, and would read whatever is called `set` to its end.
        if any(type(x) is kind for kind in TAKEN_APART):
            return super().repr1(x, level)
        return self.repr_instance(x, level)


_short = _Short()


def shown(value: object) -> str:
    """A short repr for a message; never fails, and is nothing but a str."""
    try:
        return _plain(_short.repr(value))
    except Exception:
        return f"<{type_name(value)}>"


def type_name(value: object) -> str:
    """The name of the type of `value`, for a message; never fails, and asks no metaclass."""
    return _plain(_name_of(type(value)))


def _plain(text: str) -> str:
    # A copy where it is of a subclass, whose methods may do anything when it is put into a message.
    return str.__getitem__(text, slice(None, MOST_SHOWN))
