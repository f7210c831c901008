"""What a batch that does not come in time waits for: which worker is at it, and where that is stuck."""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType

from dataloader_rs import fetch
from dataloader_rs.errors import BatchTimeoutError, origin, shown

# A worker without the GIL may run on while its frames are looked at, which is not safe; one that is stuck does not.
_MAY_RUN_ON = not getattr(sys, "_is_gil_enabled", lambda: True)()
_STUCK_FOR = 0.002


def timeout_error(timeout: float, batch: int | None = None, indices: list[int] | None = None, num_items: int = 0,
                  position: int = -1, worker: int = -1, thread_name: str = "") -> BatchTimeoutError:
    """The exception for a batch that has not come for `timeout` seconds.

    Parameters
    ----------
    timeout : float
    batch : int or None
        Its number in the epoch, or None if no worker is at it: the rest is then not known.
    indices : list of int or None
        The index of the item at `position`, or, if that is -1, those of the first items; None for a stream.
    num_items : int
        Of the batch.
    position : int
    worker : int
    thread_name : str
        Of the worker.
    """
    if batch is None:
        return BatchTimeoutError(f"no batch within {timeout:g} s: no worker is at it, all are busy with other batches")
    place = f"batch {batch} of the stream" if indices is None else origin(batch, indices, num_items, position)
    stack = "its stack is not known"
    frame = _frame_of(thread_name)
    if frame is not None:
        import traceback  # late: few ever need it

        if indices is not None and position < 0:
            place = _current_item(frame) + place
        stack = "its stack:\n" + "".join(traceback.format_stack(frame)).rstrip()
    return BatchTimeoutError(f"no batch within {timeout:g} s: worker {worker} is at {place}; {stack}")


def start_timeout_error(timeout: float) -> BatchTimeoutError:
    """The exception where workers have not started for `timeout` seconds."""
    return BatchTimeoutError(f"no batch within {timeout:g} s: worker_init_fn has not returned on all workers")


def _current_item(frame: FrameType | None) -> str:
    """The index that a whole batch is at, in words, if its items are asked for one by one."""
    item = ""
    while frame is not None:
        # The outermost one: an item may iterate a loader of its own.
        if frame.f_code.co_filename == fetch.__file__ and "index" in frame.f_locals:
            item = f"index {shown(frame.f_locals['index'])} of "
        frame = frame.f_back
    return item


def _frame_of(thread_name: str) -> FrameType | None:
    """Where the thread is; None if that cannot be said."""
    ident = next((thread.ident for thread in threading.enumerate() if thread.name == thread_name), None)
    if ident is None:
        return None
    frame = sys._current_frames().get(ident)
    if not _MAY_RUN_ON or frame is None:
        return frame
    at = frame.f_lasti
    time.sleep(_STUCK_FOR)
    again = sys._current_frames().get(ident)
    return frame if again is frame and frame.f_lasti == at else None
