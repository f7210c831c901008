"""The README keeps its word: its examples run and print what they say, and what it names is there.

A ```python block is a program of its own, run in a child process with warnings as errors. One that is marked `prelude`
is put before all blocks after it, one marked `no-run` is left out. Lines `# -> text` are what a block prints, in order.
"""

import doctest
import inspect
import re
from pathlib import Path

import pytest

from dataloader_rs import PyDataloader, collate, dataset, loader, sharing

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")

FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
KINDS = ("python", "python prelude", "python no-run")

# Blocks that need torch or OpenCV. More than these must not go untested.
NOT_RUN = 1


def fenced(*kinds: str) -> list[tuple[int, str, str]]:
    """Line, kind and text of each fenced block of the README that is of one of these kinds."""
    found = []
    for match in FENCE.finditer(README):
        if match["info"] in kinds:
            found.append((README.count("\n", 0, match.start()) + 2, match["info"], match["body"]))
    return found


def programs() -> list:
    """Every block that runs, with the preludes before it, as parameters of a test."""
    before = ""
    found = []
    for line, kind, body in fenced("python", "python prelude"):
        found.append(pytest.param(before + body, body, id=f"line-{line}"))
        if kind == "python prelude":
            before += body + "\n"
    return found


def prose() -> str:
    """The README without its fenced blocks."""
    return FENCE.sub("", README)


def anchors() -> set[str]:
    """What the headings can be linked to by, after the rules of GitHub."""
    headings = re.findall(r"^#+ (.*)$", prose(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def makefile_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize(("program", "block"), programs())
def test_readme_example_runs_and_prints_what_it_says(program: str, block: str, run_script):
    """An example ends well, warns of nothing, and prints its `# ->` lines."""
    pytest.importorskip("numpy")
    finished = run_script(program)
    assert finished.stdout.splitlines() == re.findall(r"# -> (.*)$", block, re.MULTILINE)


def test_only_blocks_for_other_libraries_are_not_run():
    """What is marked no-run needs torch or OpenCV, compiles, and is as little as ever; no block has another mark."""
    marked = fenced("python no-run")
    assert len(marked) == NOT_RUN
    for line, _, body in marked:
        assert re.search(r"^import (torch|cv2)$", body, re.MULTILINE)
        compile("\n" * (line - 1) + body, "README.md", "exec")
    infos = [match["info"] for match in FENCE.finditer(README)]
    assert {info for info in infos if info.startswith("py")} == set(KINDS)
    assert README.count("```") == 2 * len(infos)


def test_arguments_table_lists_the_signature():
    """Names, order and defaults in the table are those of PyDataloader."""
    section = README.partition("\n## Arguments\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (?:`([^`]*)`|required) \|", section, re.MULTILINE)
    parameters = inspect.signature(PyDataloader).parameters.values()
    expected = [(parameter.name, "" if parameter.default is parameter.empty else repr(parameter.default))
                for parameter in parameters]
    assert rows == expected


def test_named_make_targets_exist():
    """Whatever the README tells to `make` is a target of the Makefile."""
    if not (ROOT / "Makefile").exists():
        pytest.skip("no Makefile here")
    commands = re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE)
    assert {"demo", "test"} <= set(commands) <= makefile_targets()


def test_links_within_the_project_resolve():
    """A link to a heading finds it, and one to a file of the project too."""
    links = re.findall(r"\]\(([^)\s]+)\)", prose())
    assert links
    for link in links:
        if link.startswith("#"):
            assert link[1:] in anchors(), link
        elif "://" not in link:
            assert (ROOT / link).exists(), link


def test_named_files_exist():
    """Source files that the text names in code style are in the package or in the project."""
    for name in re.findall(r"`((?:\w+/)*\w+\.(?:py|pyx|c|h|md))`", prose()):
        assert (ROOT / name).exists() or (ROOT / "dataloader_rs" / name).exists() or name == "train.py", name


@pytest.mark.parametrize("module", [collate, dataset, loader, sharing], ids=lambda module: module.__name__)
def test_docstring_examples_run(module):
    """The examples in the docstrings of the package give what they say."""
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0
