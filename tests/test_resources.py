"""Too few threads, files or memory: an error that says what ran out, nothing is left, and a smaller loader works."""

import os
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>

static pthread_t caller;
static int calls, refused = -1;

void refuse_thread(int number) { caller = pthread_self(); calls = 0; refused = number; }

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*body)(void *), void *argument)
{
    int (*create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) = dlsym(RTLD_NEXT, "pthread_create");
    if (refused >= 0 && pthread_equal(caller, pthread_self()) && calls++ == refused)
        return EAGAIN;
    return create(thread, attributes, body, argument);
}
"""

START = """
import ctypes
import os
import resource
import sys
from conftest import eventually, worker_threads
from dataloader_rs import PyDataloader
from toy_datasets import Ids

refuse = getattr(ctypes.CDLL(None), "refuse_thread", None)
"""


@pytest.fixture
def refusing(tmp_path, monkeypatch):
    """In scripts, ``refuse(k)`` lets the call number k, from 0, of pthread_create by its caller fail; -1: none."""
    if sys.platform != "linux" or shutil.which("gcc") is None:
        pytest.skip("needs Linux and gcc")
    (tmp_path / "shim.c").write_text(SHIM)
    subprocess.run(["gcc", "-shared", "-fPIC", str(tmp_path / "shim.c"), "-o", str(tmp_path / "shim.so"), "-ldl"],
                   check=True)
    # A sanitizer comes first.
    monkeypatch.setenv("LD_PRELOAD", " ".join([*os.environ.get("LD_PRELOAD", "").split(), str(tmp_path / "shim.so")]))


def test_each_thread_may_be_refused(run_script, refusing):
    """The RuntimeError tells what could not be started; those that were started end; then the same loader works."""
    run_script(START + """
for number in range(4):
    started, ended = [], []
    loader = PyDataloader(Ids(6), 2, num_workers=4, worker_init_fn=started.append, worker_exit_fn=ended.append)
    refuse(number)
    try:
        iter(loader)
    except RuntimeError as error:
        assert "cannot start 4 worker threads (num_workers * items_in_parallel): Resource" in str(error), error
    else:
        sys.exit("no error")
    assert sorted(started) == sorted(ended) == list(range(number)), (started, ended)
    assert eventually(lambda: not worker_threads())
    refuse(-1)
    assert list(PyDataloader(Ids(6), 2, num_workers=1)) == list(loader) == [[0, 1], [2, 3], [4, 5]]
    loader.close()
""")


@pytest.mark.parametrize("use", ["iter", "close", "thread"])
def test_failed_start_does_not_wait_for_a_worker_that_uses_the_loader(run_script, refusing, use):
    """worker_init_fn that iterates or closes its own loader, or waits for a thread that does, and a thread refused."""
    run_script(START + """
import threading

def use(worker):
    try:
        loader.close() if sys.argv[1] == "close" else iter(loader)
    except RuntimeError:
        pass

def init(worker):
    if sys.argv[1] == "thread":
        helper = threading.Thread(target=loader.close)
        helper.start()
        helper.join(0.5)
    else:
        use(worker)

loader = PyDataloader(Ids(4), num_workers=3, worker_init_fn=init, worker_exit_fn=use)
refuse(2)
try:
    iter(loader)
except RuntimeError as error:
    assert "cannot start 3 worker threads" in str(error), error
else:
    sys.exit("no error")
refuse(-1)
assert list(PyDataloader(Ids(2), num_workers=2)) == [[0], [1]]
""", use, timeout=40)


def test_no_descriptor_is_needed(run_script):
    """Loading goes on where no file can be opened."""
    run_script(START + """
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
try:
    os.dup(0)
except OSError:
    for workers in (0, 2):
        assert list(PyDataloader(Ids(4), 2, num_workers=workers, items_in_parallel=2)) == [[0, 1], [2, 3]]
else:
    sys.exit("a file could be opened")
""")


def test_no_room_for_stacks_is_a_runtime_error(run_script):
    """`RLIMIT_AS`: so many threads do not fit, a smaller loader does."""
    run_script(START + """
list(PyDataloader(Ids(2), num_workers=1))
with open("/proc/self/statm") as statm:
    size = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (200 << 20), resource.RLIM_INFINITY))
try:
    iter(PyDataloader(Ids(2), num_workers=200))
except (RuntimeError, MemoryError) as error:
    assert "200 worker threads" in str(error), error
else:
    sys.exit("no error")
assert eventually(lambda: not worker_threads())
assert list(PyDataloader(Ids(3), num_workers=2)) == [[0], [1], [2]]
""")


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs root on Linux, to be somebody else")
def test_user_who_may_have_no_more_threads_is_told(run_script):
    """`RLIMIT_NPROC`, which root is not bound by: the error says so, what was started ends, a smaller loader works."""
    run_script(START + """
def used():
    mine = 0
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat("/proc/" + process).st_uid == os.geteuid():
                mine += len(os.listdir(f"/proc/{process}/task"))
        except OSError:
            pass
    return mine

started, ended = [], []
large = PyDataloader(Ids(4), num_workers=16, worker_init_fn=started.append, worker_exit_fn=ended.append)
os.setgroups([])
os.setgid(54321)
os.setuid(54321)  # nobody else is
resource.setrlimit(resource.RLIMIT_NPROC, (used() + 6, used() + 6))
for _ in range(3):
    try:
        iter(large)
    except RuntimeError as error:
        assert "cannot start 16 worker threads (num_workers * items_in_parallel): Resource" in str(error), error
    else:
        sys.exit("no error")
    assert sorted(started) == sorted(ended), (started, ended)
    assert len(started) < 16
    assert eventually(lambda: not worker_threads())
    assert list(PyDataloader(Ids(3), num_workers=2)) == [[0], [1], [2]]
    assert eventually(lambda: not worker_threads())
    started.clear()
    ended.clear()
""")
