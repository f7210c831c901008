"""The documentation keeps its word: its examples run and print what they say, and what it names is there."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from documentation import (
    GUIDE,
    INCLUDED,
    KINDS,
    PAGES,
    README,
    ROOT,
    anchors_of,
    blocks_of,
    name_of,
    program_of,
    prose_of,
    text_of,
)

from dataloader_rs import PyDataloader

# Blocks that need OpenCV. More than these must not go untested.
NOT_RUN = 1

WITH_EXAMPLES = [page for page in PAGES if program_of(page, "python")[0]]


def section_of(page: Path, heading: str) -> str:
    return text_of(page).partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=name_of)
def test_examples_of_a_page_run_and_print_what_they_say(page: Path, run_script):
    """Each example ends well, warns of nothing, and prints its `# ->` lines."""
    pytest.importorskip("numpy")
    program, printed = program_of(page, "python")
    assert run_script(program, timeout=50).stdout.splitlines() == printed


def test_pages_with_examples_are_found():
    """The README and the pages of the guide have examples; a page or a mark that is spelled wrong is not passed by."""
    assert {README, GUIDE} < set(WITH_EXAMPLES)
    assert len(WITH_EXAMPLES) > 10
    for page in PAGES:
        kinds = {block.kind for block in blocks_of(page)}
        assert {kind for kind in kinds if kind.startswith("py")} <= KINDS, name_of(page)
        assert text_of(page).count("```") == 2 * len(blocks_of(page)), name_of(page)


def test_only_blocks_for_other_libraries_are_not_run():
    """What is marked torch or no-run needs another library, and compiles; no-run is as little as ever."""
    for kind, library in [("python torch", "torch"), ("python no-run", "cv2")]:
        marked = [(page, block) for page in PAGES for block in blocks_of(page) if block.kind == kind]
        assert marked
        for page, block in marked:
            assert re.search(rf"^(import|from) {library}\b", block.source, re.MULTILINE), (name_of(page), block.line)
            compile("\n" * (block.line - 1) + block.source, name_of(page), "exec")
    assert len(marked) == NOT_RUN


def test_arguments_table_lists_the_signature():
    """Names, order and defaults in the table are those of PyDataloader."""
    rows = re.findall(r"^\| `(\w+)` \| (?:`([^`]*)`|required) \|", section_of(README, "Arguments"), re.MULTILINE)
    parameters = inspect.signature(PyDataloader).parameters.values()
    expected = [(parameter.name, "" if parameter.default is parameter.empty else repr(parameter.default))
                for parameter in parameters]
    assert rows == expected


@pytest.mark.parametrize("heading", ["Performance", "When another loader wins"])
def test_figures_of_the_readme_are_those_of_the_benchmarks(heading: str):
    """Each figure in these tables stands in BENCH.md with the same digits."""
    if not (ROOT / "BENCH.md").exists():
        pytest.skip("no BENCH.md here")
    measured = set(re.findall(r"-?\d[\d.]*(?: [kM]\b)?", text_of(ROOT / "BENCH.md")))
    cells = [cell for row in re.findall(r"^\|(.*)\|$", section_of(README, heading), re.MULTILINE)[2:]
             for cell in row.split("|")[1:]]
    figures = [figure for cell in cells for figure in re.findall(r"\d[\d.]*(?: [kM]\b)?", cell)]
    assert len(figures) > 10
    assert set(figures) <= measured, set(figures) - measured


def test_named_make_targets_exist():
    """Whatever a page tells to `make` is a target of the Makefile; the changelog also tells of those that were."""
    if not (ROOT / "Makefile").exists():
        pytest.skip("no Makefile here")
    targets = set(re.findall(r"^([a-z-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    commands = {command for page in [*PAGES, *INCLUDED] if page.name != "CHANGELOG.md"
                for command in re.findall(r"(?:^|`)make ([a-z-]+)", text_of(page), re.MULTILINE)}
    assert {"demo", "docs", "test"} <= commands <= targets


@pytest.mark.parametrize("page", [*PAGES, *INCLUDED], ids=name_of)
def test_links_within_the_project_resolve(page: Path):
    """A link to a file of the project finds it, and one to a heading too."""
    for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if "://" not in link:
            file, _, anchor = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            assert target.exists(), link
            assert not anchor or anchor in anchors_of(target), link


def test_named_files_exist():
    """Source files that the pages name in code style are in the package, in the project or among its examples."""
    for page in PAGES:
        for name in re.findall(r"`((?:\w+/)*\w+\.(?:py|pyx|pxi|c|h|md))`", prose_of(page)):
            places = [ROOT, ROOT / "dataloader_rs", ROOT / "examples"]
            assert any((place / name).exists() for place in places) or name == "train.py", name
