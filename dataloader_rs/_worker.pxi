# What a worker calls: when its thread starts, for each stretch of work, and when its thread ends.

from cpython.exc cimport PyErr_WriteUnraisable
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF

from dataloader_rs.threads import adopt_thread, forget_thread


cdef bint on_start(dlrs_worker *worker, PyObject *crew) noexcept:
    while not dlrs_try_begin_step():    # see NOTE [ steps and forks ]
        with nogil:
            dlrs_await_no_fork()
    try:
        adopt_thread(dlrs_worker_name(worker).decode("ascii"))
    except MemoryError:
        pass    # a worker works without a name
    finally:
        dlrs_end_step()
    if crew == NULL:
        return True
    dlrs_set_current_crew(crew, dlrs_worker_index(worker))
    try:
        return (<object>crew).start(dlrs_worker_index(worker))
    except BaseException:
        return False    # no memory for keeping the user's error, either


cdef void on_end(dlrs_worker *worker, PyObject *crew) noexcept:
    if crew != NULL:
        end_in_crew(<object>crew, dlrs_worker_index(worker))
        dlrs_set_current_crew(NULL, 0)
    try:
        forget_thread()
    except MemoryError:
        pass


cdef void end_in_crew(crew, unsigned worker) noexcept:
    # Call worker_exit_fn. Nobody waits for what it raises.
    cdef object number
    cdef object function
    cdef PyObject *result
    try:
        number = worker
        function = crew.exit_function(number)
    except BaseException:
        return
    if function is None:
        return
    result = PyObject_CallOneArg(<PyObject *>function, <PyObject *>number)
    if result == NULL:
        PyErr_WriteUnraisable(function)
    else:
        Py_DECREF(<object>result)


cdef void on_work(dlrs_worker *worker, const dlrs_run *first) noexcept:
    cdef dlrs_run run = first[0]
    while work_for_epoch(worker, &run):
        pass


cdef bint work_for_epoch(dlrs_worker *worker, dlrs_run *run) noexcept:
    # Do runs for as long as they are of one epoch. Is there a run, of another?
    cdef _Epoch epoch = <_Epoch>run.user
    cdef object context = epoch.contexts[dlrs_worker_index(worker)]
    cdef PyObject *outcome
    cdef void *unwanted
    cdef dlrs_epoch *orphan
    cdef bint more = True
    cdef dlrs_place *place = dlrs_get_worker_place()
    enter_context(context)
    dlrs_set_current_epoch(<PyObject *>epoch)
    dlrs_enter_place(place, <PyObject *>epoch)
    while more and run.user == <void *>epoch:
        dlrs_worker_let_consumers_pass(worker)
        outcome = epoch.work(worker, run)
        dlrs_ask_nothing(place)
        more = dlrs_worker_next(worker, run, outcome, &unwanted, &orphan)
        if unwanted != NULL:
            Py_DECREF(<object>unwanted)
        if orphan != NULL:
            # The iterator is gone, and what it left to the workers is ours to drop.
            epoch.epoch_ptr = NULL
            dlrs_epoch_free(orphan)
            Py_DECREF(epoch)
    dlrs_leave_place(place)
    dlrs_set_current_epoch(NULL)
    leave_context(context)
    return more


cdef void enter_context(context) noexcept:
    try:
        PyContext_Enter(context)
    except RuntimeError:
        pass    # native code of the user entered a context and did not leave it, see leave_context


cdef void leave_context(context) noexcept:
    try:
        PyContext_Exit(context)
    except RuntimeError:
        pass    # the same; the runs must go on


cdef dlrs_python python
python.interpreter = PyInterpreterState_Get()
python.start = on_start
python.work = on_work
python.end = on_end
