"""The examples run as a user runs them, check what they come to, and are all listed.

Those that need torch or scikit-learn, which are large, are run by ``tests/integration``.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import FREE_THREADED, SLOWDOWN, child_environment
from documentation import README, ROOT, text_of
from test_make import made

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
# What each needs beside the package; what most of them share is no example itself.
NEEDS = {
    "digits.py": ["numpy", "PIL", "sklearn", "tqdm"],
    "http_store.py": ["uvicorn"],
    "memory_map.py": ["numpy"],
    "resume.py": ["numpy"],
    "sqlite_rows.py": ["sqlite3"],
    "tokenise.py": ["numpy"],
    "torch_training.py": ["numpy", "sklearn", "torch"],
}
LARGE = {"sklearn", "torch"}
LIGHT = sorted(name for name, needs in NEEDS.items() if not LARGE & set(needs))


def run_example(name: str, folder: Path, *arguments: str) -> list[str]:
    """The lines that an example prints, run from a folder of its own; it must end well and write nothing to stderr."""
    for needed in NEEDS[name]:
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed, which examples/{name} needs")
    env = {**child_environment(), "XDG_CACHE_HOME": str(folder), "TMPDIR": str(folder), "PYTHONFAULTHANDLER": "1"}
    env.pop("PYTHONSAFEPATH", None)  # what examples share lies beside them
    finished = subprocess.run([sys.executable, "-W", "error", str(EXAMPLES / name), *arguments], cwd=folder, env=env,
                              capture_output=True, text=True, timeout=55 * SLOWDOWN)
    assert (finished.stderr, finished.returncode) == ("", 0), finished
    return finished.stdout.splitlines()


@pytest.mark.parametrize("name", LIGHT)
def test_example_runs_in_under_a_minute(name: str, tmp_path: Path):
    """It ends well, warns of nothing, says on which Python it ran, and leaves no file behind."""
    kind = "free-threaded" if FREE_THREADED else "with the GIL"
    printed = run_example(name, tmp_path)
    assert kind in printed[0], printed
    assert len(printed) > 2
    assert os.listdir(tmp_path) == []


def test_every_example_is_run():
    """A script in ``examples`` that has a main() is in the table above, and nothing else is."""
    scripts = {path.name for path in EXAMPLES.glob("*.py") if 'if __name__ == "__main__":' in text_of(path)}
    assert scripts == set(NEEDS)
    assert len(LIGHT) == 5


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "guide" / "examples.md"], ids=lambda page: page.name)
def test_every_example_is_listed_with_a_line(page: Path):
    """A row of a table for each, which links to it and says what it shows."""
    rows = re.findall(r"^\| \[`(\w+\.py)`\]\((?:\.\./)*examples/(\w+\.py)\) \|([^|]+)\|", text_of(page), re.MULTILINE)
    assert [name for name, _, _ in rows] == sorted(NEEDS)
    for name, linked, says in rows:
        assert name == linked and len(says.split()) > 3, name


@pytest.mark.parametrize("name", sorted(NEEDS))
def test_example_says_what_it_shows(name: str):
    """Its first line is a sentence, the rest of the docstring says when one would do it so, and --help shows it."""
    source = text_of(EXAMPLES / name)
    docstring = compile(source, name, "exec").co_consts[0]
    first, _, rest = docstring.partition("\n\n")
    assert re.fullmatch(r"[A-Z][^\n]+\.", first) and len(rest.split()) > 20, docstring
    assert '__doc__ or "").partition' in source


def test_make_examples_runs_all_but_the_one_with_torch():
    """`make examples` names each of the others in what it would do."""
    told = made("-n", "examples")
    assert told.returncode == 0, told.stderr
    (loop,) = re.findall(r"for example in (.*?);", told.stdout)
    assert loop.split() == [f"examples/{name}" for name in sorted(NEEDS) if name != "torch_training.py"]


def test_store_that_misbehaves_costs_no_later_object(run_script):
    """http_store.py goes on over one connection, opened again, where a server closes it, cuts an answer, or is late."""
    run_script("""
    import http.client, sys, threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
    sys.path.insert(0, sys.argv[1])
    from http_store import Objects

    class Rude(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        def do_GET(self):
            if self.path == "/late":
                over.wait(20)
                self.close_connection = True
                return
            self.send_response(404 if self.path == "/none" else 200)
            self.send_header("Content-Length", "5" if self.path == "/cut" else "4")
            self.end_headers()
            self.wfile.write(b"body")
            self.close_connection = self.path != "/none"  # without a word
        def log_message(self, *arguments):
            pass

    over = threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Rude) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            objects = Objects(server.server_port, ["a", "b"])
            for name, error in [("none", OSError), ("cut", http.client.IncompleteRead), ("late", TimeoutError)]:
                assert [objects[0], objects[1]] == [b"body", b"body"]
                objects.connection().timeout = 0.5 if name == "late" else 20
                objects.connection().close()
                try:
                    objects.fetch(name)
                except error:
                    pass
                else:
                    raise AssertionError(name)
            objects.connection().timeout = 20
            assert [objects[0], objects[1]] == [b"body", b"body"]
            assert len(objects.opened) == 1
            objects.close()
        finally:
            over.set()
            server.shutdown()
    """, str(EXAMPLES))


@pytest.mark.parametrize("epoch", ["0", "2"])
def test_run_that_is_killed_in_its_first_or_last_epoch_ends_alike(epoch: str, tmp_path: Path):
    """Before there is a checkpoint the run begins anew; in the last of three epochs, it goes on with that."""
    printed = run_example("resume.py", tmp_path, "--epochs", "3", "--killed-in", epoch)
    assert printed[1].startswith(f"killed in epoch {epoch};")
    assert printed[-1] == "the models are the same to the last bit"
