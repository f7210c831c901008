# The worker threads of a loader, and what becomes of all of them when the process ends.

import atexit
import sys
import threading

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport uint64_t
from libc.string cimport strerror


# As large as that of a main thread usually is.
cdef size_t DEFAULT_STACK_SIZE = 8 << 20

# How long the end of the process waits for workers that are inside Python, in pieces of SIGNAL_CHECK_NS.
cdef int EXIT_CHECKS = 20


cdef bint on_worker_of(uint64_t pool_id) except -1:
    # Is the calling thread a worker of that pool, or works, perhaps through loaders inside loaders, for one?
    cdef PyObject *current = dlrs_get_current_epoch()
    if pool_id == 0:
        return False
    if pool_id == dlrs_get_current_pool():
        return True
    if current == NULL or (<_Epoch>current).generation != dlrs_process_generation():
        return False
    return pool_id in (<_Epoch>current).pools


def _always():
    return True


cdef object exiting(what):
    # What to raise when there are no workers any more because the interpreter exits. A thread that is still in a loop
    # then is a daemon thread, which ends without a word; the interpreter would stop it a moment later anyway.
    if threading.current_thread() is threading.main_thread():
        return RuntimeError(f"{what}: the interpreter is exiting")
    return SystemExit()


def stack_size():
    """Stack of a worker, in bytes: the usual one, or what the program asked for with `threading.stack_size` if more."""
    # A call of threading.stack_size() would set it back to 0.
    return max(PyThread_get_stacksize(), DEFAULT_STACK_SIZE)


@cython.final
cdef class WorkerPool:
    """The worker threads of a loader, or, with 0 threads, only the token that says whether it was closed.

    If the system starts no more threads, it is made all the same, not usable, and `check_started` tells.

    Parameters
    ----------
    num_threads : int
    stack_size : int
        Of each thread, in bytes.
    adaptive : bool
        Whether to keep workers parked that only get in each other's way.
    crew : Crew or None
        What its workers know of themselves and call when they start and end.

    Raises
    ------
    RuntimeError
        If the interpreter is exiting.
    SystemExit
        If the interpreter is exiting, on a daemon thread.
    MemoryError

    Notes
    -----
    Making it waits for nobody. Dropping it lets the threads end after what they are at, and waits for none of them.
    Thread safe.
    """

    cdef dlrs_pool *pool_ptr
    cdef dlrs_python *python_ptr    # the workers' and ours; NULL once we have left it
    cdef readonly object crew
    cdef uint64_t pool_id       # 0 without threads
    cdef readonly unsigned num_threads
    cdef readonly uint64_t generation
    cdef uint64_t closed
    cdef int start_error        # number of the system's error that kept a thread from starting, or 0

    def __cinit__(self, unsigned num_threads, size_t stack_size, bint adaptive, crew):
        cdef dlrs_pool_options options
        cdef dlrs_python *shared
        cdef dlrs_status status
        check_threads(num_threads, 1)
        self.generation = dlrs_process_generation()
        self.num_threads = num_threads
        self.crew = crew
        if num_threads == 0:
            return
        options.num_threads = num_threads
        options.stack_size = stack_size
        options.exclusive = getattr(sys, "_is_gil_enabled", _always)()
        # Without a GIL nobody is kept waiting by workers that enter.
        options.enters_at_once = not options.exclusive or (crew is not None and crew.has_functions)
        options.adaptive = adaptive
        shared = dlrs_python_new(&python, NULL if crew is None else <PyObject *>crew, num_threads)
        if shared == NULL:
            raise MemoryError(f"no memory for {num_threads} worker threads")
        options.hooks = dlrs_python_hooks(shared)
        # Attached, some 20 us a thread: it waits for nobody, and a worker that enters at once would take the GIL.
        status = dlrs_pool_new(&options, &self.pool_ptr, &self.start_error)
        if self.pool_ptr != NULL:
            self.python_ptr = shared
            self.pool_id = dlrs_pool_id(self.pool_ptr)
            return
        dlrs_python_free(shared)
        if status == DLRS_NO_MEMORY:
            raise MemoryError(f"no memory for {num_threads} worker threads")
        raise exiting("cannot start worker threads")

    def __del__(self):
        # Not in __dealloc__: the workers that end now may call functions of the user, and the collector, which calls
        # this first, leaves alone what they still need. See NOTE [ who holds the crew ].
        cdef dlrs_python *left = self.python_ptr
        if left == NULL or self.generation != dlrs_process_generation():
            return
        self.python_ptr = NULL
        dlrs_store(&self.closed, 1)
        dlrs_pool_stop(self.pool_ptr)
        if self.crew is not None:
            Py_INCREF(self.crew)
        dlrs_python_leave(left)

    def __dealloc__(self):
        if self.pool_ptr != NULL:
            dlrs_pool_release(self.pool_ptr)

    def __reduce__(self):
        raise TypeError("threads cannot be pickled")

    @property
    def usable(self):
        """Whether epochs can be started on it: not closed, not failed, and not the parent process's."""
        if self.generation != dlrs_process_generation() or dlrs_load(&self.closed):
            return False
        return self.pool_ptr == NULL or dlrs_pool_is_usable(self.pool_ptr)

    def check_started(self):
        """Raise a RuntimeError if a thread could not be started, once those that did start have ended.

        Ctrl-C ends the wait. They may be in ``worker_init_fn``, so the caller must not hold what that could ask for.
        """
        if self.start_error == 0:
            return
        self.wait()
        raise RuntimeError(f"cannot start {self.num_threads} worker threads (num_workers * items_in_parallel): "
                           f"{strerror(self.start_error).decode('utf-8', 'replace')}")

    def check_caller(self):
        """Raise a RuntimeError on a worker of this pool, for which its epoch would wait."""
        if on_worker_of(self.pool_id):
            raise RuntimeError("a loader cannot be iterated by its own worker, which the epoch would wait for: "
                               "use another loader, or num_workers=0 for the inner one")

    def close(self):
        """Let the threads end after what they are at, and wait for it. Ctrl-C ends the wait.

        Raises
        ------
        RuntimeError
            On one of these threads, which cannot wait for itself.
        """
        if on_worker_of(self.pool_id):
            raise RuntimeError("a loader cannot be closed by its own worker")
        dlrs_store(&self.closed, 1)
        if self.pool_ptr == NULL:
            return
        dlrs_pool_stop(self.pool_ptr)
        self.wait()

    cdef int wait(self) except -1:
        """Wait until all threads of the stopped pool have ended."""
        cdef bint ended = False
        while not ended:
            with nogil:
                ended = dlrs_pool_wait(self.pool_ptr, SIGNAL_CHECK_NS)
            PyErr_CheckSignals()
        return 0


def _stop_all_workers():
    # Once, when the interpreter exits: workers that wait end at once, those inside Python are given a second, and
    # the rest is abandoned, so that a stuck call does not hold up the exit. Nothing is freed under an abandoned
    # thread; it ends, or sleeps for ever, when it next asks for the interpreter.
    cdef bint ended = False
    cdef int _
    with nogil:
        dlrs_process_stop()
    try:
        for _ in range(EXIT_CHECKS):
            with nogil:
                ended = dlrs_process_wait(SIGNAL_CHECK_NS)
            if ended:
                return
            PyErr_CheckSignals()
    except (KeyboardInterrupt, SystemExit):
        return  # Ctrl-C, or a handler that calls sys.exit(): whoever sent it wants the end, and that is near


atexit.register(_stop_all_workers)
