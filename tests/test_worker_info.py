"""Workers call a function when they start and one when they end, and know who they are."""

from __future__ import annotations

import functools
import gc
import signal
import sys
import threading
import time
import weakref

import pytest
from conftest import eventually, run_threaded, worker_threads
from reference import drained
from toy_datasets import PATIENCE, Calls, GatedDataset, Ids

from dataloader_rs import PyDataloader, PyDataset, get_worker_info, worker_info

SIZES = [(0, 1), (0, 3), (1, 1), (1, 3), (4, 1), (4, 3)]
every_size = pytest.mark.parametrize(("num_workers", "items_in_parallel"), SIZES)
with_workers = pytest.mark.parametrize(("num_workers", "items_in_parallel"), SIZES[2:])
without_workers = pytest.mark.parametrize(("num_workers", "items_in_parallel"), SIZES[:2])


def load(dataset, num_workers: int, items_in_parallel: int, **arguments) -> PyDataloader:
    return PyDataloader(dataset, num_workers=num_workers, items_in_parallel=items_in_parallel, **arguments)


class Log:
    """A function for workers that remembers who called it, and on which thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(self, worker_id: int) -> None:
        self.calls.append((worker_id, threading.get_ident()))

    @property
    def ids(self) -> list[int]:
        return sorted(worker_id for worker_id, _ in self.calls)


class Fails:
    """Raises `error` on some workers; the others wait for `gate`, if there is one."""

    def __init__(self, errors: dict[int, BaseException], gate: threading.Event | None = None) -> None:
        self.errors = errors
        self.gate = gate

    def __call__(self, worker_id: int) -> None:
        if worker_id in self.errors:
            raise self.errors[worker_id]
        if self.gate is not None:
            self.gate.wait(PATIENCE)


# ---- when a worker starts ----


@with_workers
def test_init_function_runs_once_on_each_worker_before_its_first_sample(num_workers, items_in_parallel):
    """B65: ids from 0, each once for all epochs, on the thread whose samples come after it."""
    log = Log()
    own = threading.local()

    def init(worker_id: int) -> None:
        own.worker = worker_id
        log(worker_id)

    loader = load(Calls(40, lambda index: (own.worker, threading.get_ident())), num_workers, items_in_parallel,
                  worker_init_fn=init)
    for _ in range(3):
        samples = sum(loader, [])
        assert set(samples) <= set(log.calls)
    assert log.ids == list(range(num_workers * items_in_parallel))
    assert len({thread for _, thread in log.calls}) == num_workers * items_in_parallel


@with_workers
def test_first_batch_comes_when_all_workers_have_started(num_workers, items_in_parallel):
    """Also workers that will never get a sample: after the first next(), all have called the function."""
    for _ in range(5):
        log = Log()
        batches = iter(load(Ids(4), num_workers, items_in_parallel, worker_init_fn=log))
        next(batches)
        assert log.ids == list(range(num_workers * items_in_parallel))


def test_workers_start_at_the_same_time():
    """Init functions may wait for each other."""
    barrier = threading.Barrier(4)
    assert sum(load(Ids(8), 4, 1, worker_init_fn=lambda worker_id: barrier.wait(PATIENCE)), []) == list(range(8))


def test_worker_that_has_started_works_while_another_starts():
    """Loading ahead does not wait for the last of them."""
    gate = threading.Event()
    dataset = GatedDataset(4, closed=())
    batches = iter(load(dataset, 2, 1, worker_init_fn=lambda worker_id: worker_id == 0 or gate.wait(PATIENCE)))
    dataset.wait_until_started({0, 1})
    gate.set()
    assert sum(batches, []) == [0, 1, 2, 3]


@with_workers
def test_threads_after_close_start_anew(num_workers, items_in_parallel):
    """The functions belong to a thread, not to the loader."""
    started, ended = Log(), Log()
    loader = load(Ids(4), num_workers, items_in_parallel, worker_init_fn=started, worker_exit_fn=ended)
    for round in (1, 2):
        list(loader)
        loader.close()
        assert started.ids == ended.ids == sorted([*range(num_workers * items_in_parallel)] * round)


@with_workers
def test_error_of_the_init_function_is_raised_by_the_first_next(num_workers, items_in_parallel):
    """B65: the object itself, within a second, with a note; then the epoch is over and the loader can be dropped."""
    before = worker_threads()
    last = num_workers * items_in_parallel - 1
    error = ValueError("no connection")
    loader = load(Ids(8), num_workers, items_in_parallel, worker_init_fn=Fails({last: error}))
    start = time.monotonic()
    batches = iter(loader)
    outcomes = drained(batches)
    assert time.monotonic() - start < 1
    assert outcomes == [error]
    assert outcomes[0] is error
    assert error.__notes__ == [f"dataloader_rs: raised by worker_init_fn, in worker {last}"]
    assert len(batches) == 0
    del batches, loader
    assert eventually(lambda: worker_threads() <= before)


@with_workers
def test_error_does_not_wait_for_the_other_workers(num_workers, items_in_parallel):
    """B65: one fails and the others hang: the error comes all the same."""
    gate = threading.Event()
    error = ValueError("no connection")
    loader = load(Ids(8), num_workers, items_in_parallel, worker_init_fn=Fails({0: error}, gate))
    start = time.monotonic()
    with pytest.raises(ValueError) as caught:
        next(iter(loader))
    assert caught.value is error
    assert time.monotonic() - start < 1
    gate.set()


def test_of_several_errors_that_of_the_lowest_number_is_raised():
    """Which thread came first does not matter, as far as that can be known."""
    barrier = threading.Barrier(4)

    def fail(worker_id: int) -> None:
        barrier.wait(PATIENCE)
        raise ValueError(worker_id)

    crew = load(Ids(8), 4, 1, worker_init_fn=fail)._new_crew()
    run_threaded(crew.start, 4)
    assert crew.expect().error.args == (0,)
    loader = load(Ids(8), 4, 1, worker_init_fn=fail)
    with pytest.raises(ValueError):
        next(iter(loader))


@with_workers
def test_all_iterators_get_the_error_and_a_later_epoch_starts_anew(num_workers, items_in_parallel):
    """The pool has failed for all that use it; the next iter() makes another."""
    fails = Fails({0: ValueError("not yet")}, threading.Event())
    loader = load(Ids(4), num_workers, items_in_parallel, worker_init_fn=fails)
    for batches in (iter(loader), iter(loader)):
        with pytest.raises(ValueError, match="not yet"):
            next(batches)
        assert list(batches) == []
    fails.errors.clear()
    again = iter(loader)  # whether or not all workers of the first pool have come out of the function
    fails.gate.set()
    assert list(again) == list(loader) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("error", [StopIteration(3), KeyboardInterrupt(), SystemExit(2), MemoryError()], ids=repr)
def test_odd_errors_of_the_init_function_come_out(error, num_workers):
    """Whatever is raised; StopIteration would end the loop in silence and becomes a RuntimeError."""
    if num_workers == 0:
        pytest.skip("no workers")
    outcome, = drained(iter(load(Ids(8), num_workers, 1, worker_init_fn=Fails({0: error}))))
    if isinstance(error, StopIteration):
        assert type(outcome) is RuntimeError
        outcome = outcome.__cause__
    assert outcome is error


class Interrupt(Exception):
    pass


def test_signal_interrupts_the_wait_for_workers_to_start():
    """Ctrl-C comes out of a first next() that waits, and the iterator stays good."""
    asks, gate = threading.Event(), threading.Event()

    def interrupted(number, frame):
        raise Interrupt

    def init(worker_id: int) -> None:
        asks.wait(PATIENCE)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        gate.wait(PATIENCE)

    batches = iter(load(Ids(2), 1, 1, worker_init_fn=init))
    before = signal.signal(signal.SIGUSR1, interrupted)
    try:
        with pytest.raises(Interrupt):
            asks.set()
            next(batches)
    finally:
        signal.signal(signal.SIGUSR1, before)
        gate.set()
    assert list(batches) == [[0], [1]]


def test_close_ends_the_wait_for_workers_to_start():
    """A loader that is closed meanwhile does not leave its consumer behind."""
    gate, waits = threading.Event(), threading.Event()

    def init(worker_id: int) -> None:
        waits.set()
        gate.wait(PATIENCE)

    loader = load(Ids(2), 1, 1, worker_init_fn=init)
    batches = iter(loader)
    closer = threading.Thread(target=lambda: (waits.wait(PATIENCE), loader.close()))
    closer.start()
    with pytest.raises(RuntimeError, match="closed"):
        next(batches)
    gate.set()
    closer.join(PATIENCE)


def test_own_loader_cannot_be_iterated_by_the_init_function():
    """It would wait for itself: a RuntimeError, which is the error of that worker."""
    loader = load(Ids(2), 2, 1, worker_init_fn=lambda worker_id: list(held[0]))
    held = [loader]
    with pytest.raises(RuntimeError, match="its own worker"):
        next(iter(loader))
    held.clear()


# ---- when a worker ends ----


def use_up(loader: PyDataloader) -> None:
    list(loader)


def leave_early(loader: PyDataloader) -> None:
    for _ in loader:
        break


def do_not_begin(loader: PyDataloader) -> None:
    iter(loader)


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("use", [use_up, leave_early, do_not_begin])
@with_workers
def test_exit_function_runs_once_on_each_worker(use, close, num_workers, items_in_parallel):
    """B65: on the thread that called the init function, whether the loop ran to its end or not; on drop and close."""
    started, ended = Log(), Log()
    loader = load(Ids(20), num_workers, items_in_parallel, worker_init_fn=started, worker_exit_fn=ended)
    use(loader)
    assert ended.calls == []
    if close:
        loader.close()
    else:
        del loader
        assert eventually(lambda: len(ended.calls) == num_workers * items_in_parallel)
    assert sorted(ended.calls) == sorted(started.calls)


@with_workers
def test_exit_function_needs_no_init_function(num_workers, items_in_parallel):
    """Each may be given without the other."""
    log = Log()
    with load(Ids(4), num_workers, items_in_parallel, worker_exit_fn=log) as loader:
        list(loader)
    assert log.ids == list(range(num_workers * items_in_parallel))


def test_exit_function_comes_after_the_last_sample():
    """A worker that is in a sample when the loader goes finishes it first."""
    order: list[str] = []
    dataset = GatedDataset(2, closed={0})
    loader = load(dataset, 1, 1, worker_exit_fn=lambda worker_id: order.append("exit"),
                  collate_fn=lambda samples: order.append("sample"))
    batches = iter(loader)
    dataset.wait_until_started({0})
    del loader, batches
    dataset.open()
    assert eventually(lambda: "exit" in order)
    assert order == ["sample", "exit"]


@with_workers
def test_error_of_the_exit_function_goes_to_the_unraisable_hook(num_workers, items_in_parallel, monkeypatch):
    """Nobody waits for it, so it is reported, and the other workers call theirs."""
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda hook: reported.append((hook.exc_value.args, hook.object)))

    def fail(worker_id: int) -> None:
        raise OSError(worker_id)

    with load(Ids(4), num_workers, items_in_parallel, worker_exit_fn=fail) as loader:
        list(loader)
    assert sorted(args for args, _ in reported) == [(number,) for number in range(num_workers * items_in_parallel)]
    assert all(function is fail for _, function in reported)


def test_exit_function_is_not_for_workers_that_could_not_start():
    """Their init function did not get to its end; that of the others did."""
    gate = threading.Event()
    log = Log()
    loader = load(Ids(4), 3, 1, worker_init_fn=Fails({1: ValueError()}, gate), worker_exit_fn=log)
    with pytest.raises(ValueError):
        next(iter(loader))
    gate.set()
    loader.close()
    assert log.ids == [0, 2]


AT_EXIT = """
    import os
    from dataloader_rs import PyDataloader, get_worker_info
    from toy_datasets import Ids

    def leave(worker_id):
        assert get_worker_info().id == worker_id
        os.write(1, b"left %d\\n" % worker_id)

    loader = PyDataloader(Ids(100), num_workers=2, worker_exit_fn=leave)
    batches = iter(loader)
    next(batches)
"""


def test_exit_function_runs_when_the_process_ends(run_script):
    """Workers that wait when the interpreter exits call it, too."""
    assert sorted(run_script(AT_EXIT).stdout.splitlines()) == ["left 0", "left 1"]


IN_A_CHILD = """
    import gc, os, sys, threading, time, warnings
    from dataloader_rs import PyDataloader, get_worker_info
    from toy_datasets import Ids
    warnings.filterwarnings("ignore", "This process", DeprecationWarning)
    calls = []
    loader = PyDataloader(Ids(20), num_workers=2, worker_init_fn=lambda worker_id: calls.append("start"),
                          worker_exit_fn=lambda worker_id: calls.append("end"))
    batches = iter(loader)
    next(batches)
    while sum(thread.name.startswith("dlrs-") for thread in threading.enumerate()) < 2:
        time.sleep(0.001)
    assert calls == ["start"] * 2
    child = os.fork()
    if child == 0:
        del batches
        gc.collect()
        assert calls == ["start"] * 2
        if sys.argv[1] == "use":
            assert sum(loader, []) == list(range(20))
            assert calls == ["start"] * 4
            loader.close()
            assert calls == ["start"] * 4 + ["end"] * 2
        calls.clear()
        del loader
        gc.collect()
        assert calls == []
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(batches)) == 19
    loader.close()
    assert calls == ["start"] * 2 + ["end"] * 2
"""


@pytest.mark.parametrize("what", ["use", "drop"])
def test_forked_child_calls_functions_for_its_own_workers_only(what, run_script):
    """The parent's workers are not there, so nobody starts or ends for them."""
    run_script(IN_A_CHILD, what)


FORK_ON_A_WORKER = """
    import os, sys, threading, warnings
    from dataloader_rs import PyDataloader, get_worker_info
    from toy_datasets import Ids
    warnings.filterwarnings("ignore", "This process", DeprecationWarning)

    class Forks(Ids):
        def __getitem__(self, index):
            child = os.fork()
            if child == 0:
                os._exit(get_worker_info() is not None)
            return os.waitpid(child, 0)[1], get_worker_info() is not None

    with PyDataloader(Forks(2), num_workers=1, worker_exit_fn=print) as loader:
        assert sum(loader, []) == [(0, True)] * 2
"""


def test_child_that_a_worker_forked_is_no_worker(run_script):
    """The thread goes on there, as the main thread of a process without workers."""
    assert run_script(FORK_ON_A_WORKER).stdout == "0\n"


# ---- nothing is kept alive ----


class Knows(Ids):
    """Has all that can lead back to the loader: itself, functions for its workers, and its exit."""

    loader: PyDataloader

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.started: list = []
        self.ended: list = []

    def start(self, worker_id: int) -> None:
        self.started.append(worker_id)


def end(log: list, worker_id: int) -> None:
    info = get_worker_info()
    log.append((info.id, info.dataset.length, info.dataset.loader.dataset is info.dataset))


@with_workers
def test_loader_that_its_functions_lead_back_to_is_collected(num_workers, items_in_parallel):
    """The collector ends the threads, which call their exit function while all they know is whole; then it goes."""
    before = worker_threads()
    log: list = []

    def use() -> None:
        dataset = Knows(12)
        loader = load(dataset, num_workers, items_in_parallel, worker_init_fn=dataset.start, defer_refcount=False,
                      worker_exit_fn=functools.partial(end, log),
                      collate_fn=lambda samples: (loader, samples))
        dataset.loader = loader
        batches = iter(loader)
        next(batches)

    use()
    assert eventually(lambda: gc.collect() >= 0 and worker_threads() <= before)
    assert sorted(log) == [(number, 12, True) for number in range(num_workers * items_in_parallel)]
    # A weak reference would be dead since the first collection.
    assert eventually(lambda: gc.collect() >= 0 and not any(type(found) is Knows for found in gc.get_objects()))


@with_workers
def test_dropped_loader_lets_go_of_what_its_workers_knew(num_workers, items_in_parallel):
    """Without cycles no collection is needed: the last worker to end drops dataset and functions."""
    dataset = Ids(12)
    reference = weakref.ref(dataset)
    loader = load(dataset, num_workers, items_in_parallel, worker_exit_fn=lambda worker_id, dataset=dataset: None,
                  worker_init_fn=lambda worker_id: None, defer_refcount=False)
    next(iter(loader))
    del loader, dataset
    assert eventually(lambda: reference() is None)


def test_thread_that_has_not_started_does_not_keep_the_dataset():
    """Without functions a dropped dataset goes at once, whatever its threads are at; a crew that lives shows it."""
    dataset = Ids(4)
    loader = load(dataset, 1, 1, defer_refcount=False)
    crew = loader._new_crew()
    assert crew.info(0).dataset is dataset
    reference = weakref.ref(dataset)
    del loader, dataset
    assert reference() is None


def test_many_loaders_with_functions_come_and_go():
    """Pools that are dropped at any moment of their start lose no call and no thread."""
    before = worker_threads()
    started, ended = Log(), Log()

    def hammer(number: int) -> None:
        for round in range(10):
            loader = load(Ids(12), 2, 2, worker_init_fn=started, worker_exit_fn=ended)
            batches = iter(loader)
            if round % 3:
                assert next(batches) == [0]
            if round % 3 == 2:
                loader.close()

    run_threaded(hammer, 4)
    # A thread that has not begun has no name to be known by yet.
    assert eventually(lambda: len(ended.calls) == 160 and worker_threads() <= before)
    assert started.ids == ended.ids == sorted([0, 1, 2, 3] * 40)
    assert sorted(started.calls) == sorted(ended.calls)


# ---- who am I ----


class Told(Ids):
    """Each sample is what get_worker_info() says in ``__getitem__``."""

    def __getitem__(self, index: int):
        return get_worker_info()


class ToldMany(Told):
    def __getitems__(self, indices: list[int]):
        return [get_worker_info()] * len(indices)


@pytest.mark.parametrize("kind", [Told, ToldMany])
@with_workers
def test_worker_is_told_who_it_is(kind, num_workers, items_in_parallel):
    """B65: the same in an item, in collate_fn and in both functions; the dataset is the loader's."""
    told: list = []
    dataset = kind(24)
    num_threads = num_workers * items_in_parallel
    loader = load(dataset, num_workers, items_in_parallel, batch_size=4,
                  collate_fn=lambda samples: [*samples, get_worker_info()],
                  worker_init_fn=lambda worker_id: told.append((worker_id, get_worker_info())),
                  worker_exit_fn=lambda worker_id: told.append((worker_id, get_worker_info())))
    with loader:
        infos = sum(loader, [])
    assert len(told) == 2 * num_threads
    assert all(worker_id == info.id for worker_id, info in told)
    for info in [*infos, *(info for _, info in told)]:
        assert 0 <= info.id < num_threads
        assert (info.num_workers, info.num_threads) == (num_workers, num_threads)
        assert info.dataset is dataset
    assert {info.id: info.seed for info in infos}.items() <= {info.id: info.seed for _, info in told}.items()


def test_worker_is_told_of_the_wrapper_that_the_loader_has():
    """B65: ``loader.dataset``, also where workers ask the object behind it."""
    dataset = PyDataset.of([1, 2])
    (info,), _ = load(dataset, 1, 1, collate_fn=lambda samples: [get_worker_info()])
    assert info.dataset is dataset


@every_size
def test_other_threads_are_told_nothing(num_workers, items_in_parallel):
    """None on the main thread, before, during and after an epoch, and on a thread that an item starts."""

    def ask_elsewhere(index: int):
        found = []
        thread = threading.Thread(target=lambda: found.append(get_worker_info()))
        thread.start()
        thread.join()
        return found[0]

    assert get_worker_info() is None
    for batch in load(Calls(6, ask_elsewhere), num_workers, items_in_parallel, batch_size=2):
        assert batch == [None, None]
        assert get_worker_info() is None
    assert get_worker_info() is None


@without_workers
def test_without_workers_there_is_nobody_to_tell(num_workers, items_in_parallel):
    """B65: None with 0 workers, as in torch, on the threads of items_in_parallel too; and no function is called."""
    log = Log()
    loader = load(Told(6), num_workers, items_in_parallel, batch_size=2, worker_init_fn=log, worker_exit_fn=log,
                  collate_fn=lambda samples: [*samples, get_worker_info()])
    with loader:
        assert sum(loader, []) == [None] * 9
    assert log.calls == []


class Nests(Ids):
    """Each item is what the items of another loader are told, between what this one is."""

    def __init__(self, length: int, inner: PyDataloader) -> None:
        super().__init__(length)
        self.inner = inner

    def __getitem__(self, index: int):
        before = get_worker_info()
        inner = sum(self.inner, [])
        assert get_worker_info() == before
        return before, inner


@pytest.mark.parametrize("inner", SIZES, ids=str)
@every_size
def test_nested_loader_has_the_say_on_its_own_workers(num_workers, items_in_parallel, inner):
    """On a worker of the inner pool it is about that; an inner loader that runs in the item's thread has no say."""
    dataset = Nests(3, load(Told(2), *inner))
    for (outer, infos), in load(dataset, num_workers, items_in_parallel):
        assert (outer is None) == (num_workers == 0)
        assert outer is None or outer.dataset is dataset
        for info in infos:
            if inner[0] > 0:
                assert info.dataset is dataset.inner.dataset
            else:
                assert info == (outer if inner == (0, 1) else None)


# ---- seeds ----


def seeds(**arguments) -> list[int]:
    """Seeds of the workers of a new loader, by number."""
    found = {}
    with load(Ids(2), worker_init_fn=lambda worker_id: found.update({worker_id: get_worker_info().seed}),
              **arguments) as loader:
        next(iter(loader))
    return [found[number] for number in sorted(found)]


def test_sixteen_workers_have_sixteen_seeds_and_the_same_ones_again():
    """B29: distinct, also modulo 2**32; equal for the same rng_seed, whichever thread starts first."""
    first = seeds(num_workers=16, items_in_parallel=1, rng_seed=7)
    assert len(set(first)) == len({seed % 2**32 for seed in first}) == 16
    assert all(0 <= seed < 2**64 for seed in first)
    for _ in range(50):
        assert seeds(num_workers=16, items_in_parallel=1, rng_seed=7) == first
    assert seeds(num_workers=4, items_in_parallel=4, rng_seed=7) == first
    assert not set(seeds(num_workers=16, items_in_parallel=1, rng_seed=8)) & set(first)


def test_seed_of_a_shuffle_keys_the_workers_too():
    """``seed`` is the default of rng_seed."""
    assert seeds(num_workers=2, items_in_parallel=1, shuffle=True, seed=7) == seeds(
        num_workers=2, items_in_parallel=1, rng_seed=7)


def test_loaders_without_a_seed_have_workers_with_other_seeds():
    """B29: with seed=None two runs differ."""
    assert not set(seeds(num_workers=4, items_in_parallel=1)) & set(seeds(num_workers=4, items_in_parallel=1))


def test_seed_of_a_worker_is_the_same_in_every_epoch():
    """B29: fixed for the loader, as documented; also after close(), with new threads."""
    found = set()
    loader = load(Told(40), 4, 1, rng_seed=3)
    for _ in range(3):
        found |= {(info.id, info.seed) for info in sum(loader, [])}
    loader.close()
    found |= {(info.id, info.seed) for info in sum(loader, [])}
    assert len(found) == len({number for number, _ in found})


def test_seeds_of_workers_are_frozen():
    """What a run drew from them can be drawn again with a later version."""
    assert seeds(num_workers=3, items_in_parallel=1, rng_seed=0) == [
        9357490665798856090, 2311461411412502959, 13712176230735701444]


# ---- arguments ----


@pytest.mark.parametrize("name", ["worker_init_fn", "worker_exit_fn"])
@pytest.mark.parametrize("value", [5, "start", False, [len]], ids=repr)
def test_function_that_cannot_be_called_is_a_type_error(name, value, num_workers):
    """Said when the loader is made, with or without workers, with name and value."""
    with pytest.raises(TypeError, match=rf"^{name} must be callable or None, got "):
        load(Ids(5), num_workers, 1, **{name: value})


def test_epoch_may_start_inside_the_start_of_another(monkeypatch):
    """As in a signal handler, which may run wherever the thread is, also while it holds what the start is kept by."""
    make_start = worker_info.Start
    inner = []

    def start_within():
        monkeypatch.setattr(worker_info, "Start", make_start)
        inner.append(iter(loader))
        return make_start()

    held = threading.Event()
    loader = PyDataloader(Ids(4), 2, num_workers=2, worker_init_fn=lambda worker: held.wait(PATIENCE))
    iter(loader)  # is dropped, so that nobody is left who waits for these workers
    monkeypatch.setattr(worker_info, "Start", start_within)
    outer = iter(loader)
    held.set()
    assert [list(outer), list(inner[0])] == [[[0, 1], [2, 3]]] * 2
