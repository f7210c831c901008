"""Random programs against the sequential loader: the same batches, errors and lengths, whatever the arguments.

A program makes loaders, iterates, breaks off, drops, closes, forks, changes datasets and collects garbage in any order,
with several loaders and iterators alive at once. What each epoch must give is said by ``model.py``.

`make test` runs some hundred programs, the same ones in every run; MODEL_SEED=... in the environment draws others.
`make fuzz MINUTES=10` goes on until the time is up, see ``fuzz.py``. A failure prints the shortest program it was seen
with.
"""

from __future__ import annotations

import copy
import faulthandler
import functools
import gc
import itertools
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import Counter, defaultdict, deque

import pytest
from conftest import FREE_THREADED, MODEL_SEED, eventually, on_threads, worker_threads
from model import END, Iterator, Loader, start_iterator
from plans import EPOCH, Plan, plans

from dataloader_rs import PyDataloader

pytestmark = pytest.mark.slow

hypothesis = pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, Phase, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import (  # noqa: E402
    Bundle,
    RuleBasedStateMachine,
    consumes,
    rule,
    run_state_machine_as_test,
)

# Longer than any program takes. Then it and all stacks are printed, and the process ends.
PROGRAM_SECONDS = 60.0

# The last one is followed by 0.
EPOCH_NUMBERS = st.one_of(st.integers(0, 3), st.integers(2**64 - 2, 2**64 - 1))


def step(function):
    """A rule that is written down, and what must hold after it.

    Hypothesis prints a program only if it fails each time, which no race does.
    """

    @functools.wraps(function)
    def written(self, **arguments):
        self.steps.append(f"{function.__name__}({', '.join(f'{name}={value}' for name, value in arguments.items())})")
        try:
            result = function(self, **arguments)
            self.check_all()
            return result
        except BaseException as error:
            self.has_failed = True
            error.add_note("In this program:\n    " + "\n    ".join(self.steps))
            raise

    return written


class Program(RuleBasedStateMachine):
    """A program is any sequence of these rules. Only the main thread draws and judges."""

    loaders = Bundle("loaders")
    iterators = Bundle("iterators")

    def __init__(self) -> None:
        super().__init__()
        self.alarm = self.watch_for_hang()
        self.workers_before = worker_threads()
        self.steps: list[str] = []
        self.has_failed = False
        self.calls: list = []
        self.all_loaders: list[Loader] = []
        self.all_iterators: list[Iterator] = []
        self.tokens = 0
        self.unraisable: list = []
        self.hooks = sys.unraisablehook, threading.excepthook
        sys.unraisablehook = threading.excepthook = self.unseen
        self.ignored = warnings.catch_warnings()
        self.ignored.__enter__()
        # An iterator that an earlier epoch has used up is what some programs are about, and fork with threads.
        warnings.filterwarnings("ignore", ".*yields nothing", RuntimeWarning)
        warnings.filterwarnings("ignore", "This process", DeprecationWarning)

    def unseen(self, problem) -> None:
        self.unraisable.append("".join(traceback.format_exception(problem.exc_type, problem.exc_value,
                                                                  problem.exc_traceback)))

    def watch_for_hang(self) -> threading.Timer:
        """Print the program and all stacks, and end the process, if it takes too long; in place of pytest's limit."""
        faulthandler.dump_traceback_later(PROGRAM_SECONDS, exit=True, file=hang_report)
        alarm = threading.Timer(PROGRAM_SECONDS - 5, lambda: print("A hang in this program:", *self.steps, sep="\n    ",
                                                                file=hang_report, flush=True))
        alarm.daemon = True
        alarm.start()
        return alarm

    def new_token(self) -> int:
        self.tokens += 1
        return self.tokens

    def start_one(self, loader: Loader) -> Iterator | None:
        model = start_iterator(loader, self.new_token())
        if model is not None:
            self.all_iterators.append(model)
        return model

    @staticmethod
    def may_start(loader: Loader) -> bool:
        """A one-shot batch_sampler is drawn from on the way: how far, no other epoch could tell."""
        return not (loader.plan.is_one_shot and loader.plan.shape == "batch_sampler"
                    and not all(model.ended and not model.pending for model in loader.iterators))

    @staticmethod
    def judge_all(model: Iterator | None) -> None:
        while model is not None and model.iterator is not None and not model.ended:
            outcome = model.take()
            model.judge(outcome)
            if model.closed and outcome is not END:
                break

    @rule(target=loaders, plan=plans())
    @step
    def make(self, plan: Plan):
        loader = Loader(f"loader{len(self.all_loaders)}", plan, self.calls)
        self.all_loaders.append(loader)
        return loader

    @rule(target=iterators, loader=loaders)
    @step
    def start(self, loader: Loader):
        if loader.loader is None or not self.may_start(loader):
            return hypothesis.stateful.multiple()
        model = self.start_one(loader)
        return hypothesis.stateful.multiple() if model is None else model

    @rule(model=iterators, count=st.integers(1, 4))
    @step
    def take(self, model: Iterator, count: int):
        for _ in range(count if model.iterator is not None else 0):
            num_taken = model.taken
            outcome = model.take()
            model.check_note(outcome, model.judge(outcome), num_taken)

    @rule(model=iterators)
    @step
    def take_elsewhere(self, model: Iterator):
        if model.iterator is not None:
            model.judge(on_threads(model.take)[0])

    @rule(model=iterators)
    @step
    def drain(self, model: Iterator):
        self.judge_all(model)

    @rule(loader=loaders, number=st.one_of(st.none(), EPOCH_NUMBERS))
    @step
    def whole_epoch(self, loader: Loader, number: int | None):
        """Iterate from the beginning to the end, as an epoch of that number, if there is one."""
        if loader.loader is None or not self.may_start(loader):
            return
        if number is not None:
            loader.set_epoch(number)
        self.judge_all(self.start_one(loader))

    @rule(loader=loaders, num_threads=st.integers(2, 3), breaks=st.lists(st.integers(0, 3), max_size=2),
          collects=st.booleans())
    @step
    def consume(self, loader: Loader, num_threads: int, breaks: list[int], collects: bool):
        """Several threads, each with an iterator of its own; some break off."""
        if loader.loader is None or loader.plan.is_one_shot or loader.iter_fails:
            return
        if loader.generator is not None and loader.plan.kind == "drawing":
            return  # which number of the generator goes with which epoch is not promised
        now = loader.source.version
        oldest = now if loader.prepared is None else loader.prepared
        tokens = [self.new_token() for _ in range(num_threads)]
        models = [Iterator(loader, token, oldest) for token in tokens]
        if loader.is_across:
            loader.prepared = now
        limits = [*breaks, None, None, None]

        def consumer(number: int):
            EPOCH.set(tokens[number])
            outcomes = []
            iterator = iter(loader.loader)
            while limits[number] is None or len(outcomes) < limits[number]:
                try:
                    outcomes.append(next(iterator))
                except StopIteration:
                    return [*outcomes, END]
                except BaseException as error:
                    outcomes.append(error)
            return outcomes

        functions = [lambda number=number: consumer(number) for number in range(num_threads)]
        if collects:
            functions.append(lambda: [gc.collect(1) for _ in range(5)] and [])
        results = on_threads(*functions)
        # Which of them got which epoch nobody knows.
        problem, fitting = None, []
        for order in itertools.permutations(models):
            try:
                fitting.append([self.judged(model, *item) for model, item in
                                zip(order, zip(tokens, results, strict=False), strict=True)])
            except AssertionError as error:
                problem = error
        if not fitting:
            raise AssertionError(f"no epochs have the outcomes {results}") from problem
        for model, *alternatives in zip(*fitting, strict=True):
            model.alternatives = alternatives
            self.all_iterators.append(model)

    @staticmethod
    def judged(model: Iterator, token: int, outcomes: list) -> Iterator:
        """What a thread got held against an epoch that may be another thread's."""
        trial = copy.copy(model)
        trial.pending, trial.failed, trial.token = list(model.pending), list(model.failed), token
        for got in outcomes:
            trial.judge(got)
        return trial

    @rule(model=iterators)
    @step
    def race(self, model: Iterator):
        """Two threads on one iterator: one at a time is inside, and between them they get everything once."""
        if model.iterator is None or model.ended or model.closed:
            return

        def consumer() -> list:
            outcomes = []
            while True:
                outcome = model.take()
                if outcome is END:
                    return outcomes
                if type(outcome) is RuntimeError and "under way" in str(outcome):
                    time.sleep(0)
                    continue
                outcomes.append(outcome)

        first, second = map(deque, on_threads(consumer, consumer))
        while first or second:
            problem = None
            for own in (first, second):
                if not own:
                    continue
                try:
                    model.match(own[0])
                except AssertionError as error:
                    problem = error
                else:
                    own.popleft()
                    break
            else:
                raise AssertionError(f"threads got {list(first)} and {list(second)}") from problem
        model.judge(END)

    @rule(model=consumes(iterators))
    @step
    def drop(self, model: Iterator):
        model.iterator = None

    @rule(loader=consumes(loaders))
    @step
    def drop_loader(self, loader: Loader):
        loader.loader = None

    @rule(loader=loaders)
    @step
    def close(self, loader: Loader):
        if loader.loader is not None:
            loader.loader.close()
            loader.prepared = None
            for model in loader.iterators:
                model.closed = True

    @rule(generation=st.integers(0, 2))
    @step
    def collect(self, generation: int):
        gc.collect(generation)

    @rule(loader=loaders, length=st.integers(0, 14))
    @step
    def change(self, loader: Loader, length: int):
        """Replace all values; append to the dataset or shrink it, too, unless the length stays."""
        loader.source.change(length)

    @rule(loader=loaders, epoch=EPOCH_NUMBERS)
    @step
    def set_epoch(self, loader: Loader, epoch: int):
        if loader.loader is not None:
            loader.set_epoch(epoch)

    @rule(target=loaders, loader=loaders)
    @step
    def copy_loader(self, loader: Loader):
        """A copy has the arguments, the dataset, and epoch 0."""
        if loader.loader is None or loader.plan.is_one_shot or loader.generator is not None:
            return hypothesis.stateful.multiple()
        other = copy.copy(loader)
        other.name = f"loader{len(self.all_loaders)}"
        other.loader = copy.copy(loader.loader)
        other.epoch, other.prepared, other.iterators = 0, None, []
        self.all_loaders.append(other)
        return other

    @rule(model=iterators)
    @step
    def copy_iterator(self, model: Iterator):
        """Iterators refuse to be copied."""
        if model.iterator is not None:
            for refused in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match="cannot be copied or pickled"):
                    refused(model.iterator)

    @rule(loader=loaders, luck=st.integers(0, 5))
    @step
    def fork(self, loader: Loader, luck: int):
        """In a child the iterators of its parent are refused, and a new epoch has all its batches."""
        # A free-threaded child may hang in CPython itself, see docs/guide/leaving.md.
        if luck < 5 or FREE_THREADED or loader.loader is None or not self.may_start(loader):
            return
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                self.run_in_child(loader)
                status = 0
            except BaseException:
                os.write(writer, traceback.format_exc().encode()[-4000:])
            finally:
                os._exit(status)
        os.close(writer)
        try:
            is_ready = select.select([reader], [], [], PROGRAM_SECONDS / 2)[0]
            if not is_ready:
                os.kill(child, signal.SIGKILL)
            report = os.read(reader, 4096).decode() if is_ready else "it hangs"
            status = os.waitpid(child, 0)[1]
        finally:
            os.close(reader)
        assert status == 0 and not report, f"the child failed: {report}"

    def run_in_child(self, loader: Loader) -> None:
        for model in loader.iterators:
            if model.iterator is not None and not model.ended and model.pending:
                outcome = model.take()
                assert type(outcome) is RuntimeError and "fork" in str(outcome), outcome
        loader.prepared = None
        self.judge_all(self.start_one(loader))

    def check_all(self) -> None:
        """What holds after every step."""
        for loader in self.all_loaders:
            if loader.loader is None:
                continue
            try:
                length = len(loader.loader)
            except TypeError:
                length = None
            assert length == loader.length() or (loader.plan.shape == "shards" and length is not None)
        for model in self.all_iterators:
            model.check_length()
        self.check_calls()

    def check_calls(self, is_over: bool = False) -> None:
        asked: defaultdict[int, Counter] = defaultdict(Counter)
        for token, index in list(self.calls):
            asked[token][index] += 1
        for model in self.all_iterators:
            model.check_calls(asked[model.token], is_over)

    def forget_errors(self) -> None:
        for loader in self.all_loaders:
            for faults in (loader.source.faults, loader.collate_faults, loader.yield_faults, loader.init_faults):
                faults.forget()

    def workers_have_ended(self) -> bool:
        """Whether all threads are gone, once the errors that workers still raised after the end hold no loader."""
        self.forget_errors()
        return worker_threads() <= self.workers_before

    def teardown(self) -> None:
        try:
            for loader in self.all_loaders:
                loader.loader = None
            for model in self.all_iterators:
                model.iterator = None
            self.forget_errors()
            if self.has_failed:
                return  # what comes of that is no failure of its own
            if not eventually(self.workers_have_ended, 0.01):
                assert eventually(lambda: gc.collect() >= 0 and self.workers_have_ended()), \
                    f"{worker_threads() - self.workers_before} are left"
            self.check_calls(is_over=True)
            for loader in self.all_loaders:
                if loader.plan.init == "counts":
                    assert Counter(loader.started) == Counter(loader.exited), (loader.started, loader.exited)
            assert not self.unraisable, "\n".join(self.unraisable)
        finally:
            self.alarm.cancel()
            self.ignored.__exit__(None, None, None)
            sys.unraisablehook, threading.excepthook = self.hooks
            EPOCH.set(-1)


# ---- running them ----

hang_report = sys.stderr


def run_programs(seed: int, count: int, shrinks: bool = True) -> None:
    """Run so many programs, which depend on the seed."""
    profile = settings(max_examples=count, stateful_step_count=25, deadline=None, database=None, print_blob=True,
                       # Without `explain`, which would trace every line.
                       phases=[Phase.generate, Phase.shrink] if shrinks else [Phase.generate],
                       suppress_health_check=list(HealthCheck), report_multiple_bugs=False)
    run_state_machine_as_test(hypothesis.seed(seed)(type("Program", (Program,), {})), settings=profile)


@pytest.fixture
def hangs_are_seen(capfd):
    """Stacks of a hang go where pytest has not put its own file."""
    global hang_report
    with capfd.disabled():
        hang_report = os.fdopen(os.dup(2), "w")
    yield
    faulthandler.cancel_dump_traceback_later()
    hang_report.close()
    hang_report = sys.stderr


# Hypothesis counts references in a way that CPython 3.14 does not keep, and warns of its own generator.
@pytest.mark.filterwarnings("ignore:It looks like `register_random`")
@pytest.mark.parametrize("number", range(8))
def test_random_programs_agree_with_the_sequential_loader(number, hangs_are_seen):
    """Whatever is done with loaders, in whatever order: the outcomes are those of the sequential loader."""
    # Hypothesis itself takes three times as long on free-threaded builds.
    run_programs(MODEL_SEED + number, 8 if FREE_THREADED else 16)


class Forgetful(PyDataloader):
    """Loses the first batch of each epoch."""

    def __iter__(self):
        iterator = super().__iter__()
        try:
            next(iterator, None)
        except BaseException:
            pass
        return iterator


def test_lost_batch_is_found(monkeypatch, hangs_are_seen):
    """The programs fail on a loader that loses a batch: they do look."""
    monkeypatch.setattr("model.PyDataloader", Forgetful)
    with pytest.raises((AssertionError, hypothesis.errors.Flaky)):
        run_programs(MODEL_SEED, 50, shrinks=False)
