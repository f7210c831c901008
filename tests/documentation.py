"""The pages of the documentation and the examples in them.

A ```python block is a program of its own. One that is marked `prelude` is put before all blocks after it on its page;
those of the README are for the README, those of ``docs/guide/index.md`` for all pages below ``docs``. `torch` marks a
block that needs torch and runs in ``tests/integration``, `no-run` one that is left out. Lines `# -> text` are what a
block prints, in order.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
GUIDE = ROOT / "docs" / "guide" / "index.md"
PAGES = [README, *sorted((ROOT / "docs").glob("**/*.md"))]
# Pages of the project that stand on top, and are included in the documentation as they are.
INCLUDED = [ROOT / name for name in ["BENCH.md", "CHANGELOG.md", "CONTRIBUTING.md", "RELIABILITY.md"]]

FENCE = re.compile(r"^(?P<ticks>```+)(?P<info>[^\n]*)\n(?P<body>.*?)^(?P=ticks)$", re.MULTILINE | re.DOTALL)
KINDS = {"python", "python prelude", "python torch", "python no-run"}

# Runs blocks one after the other, each in a namespace of its own, and says where each begins.
RUN = """\
for line, before, source in BLOCKS:
    print("block", line, flush=True)
    namespace = {"__name__": "__main__"}
    exec(compile(before, "prelude", "exec"), namespace)
    exec(compile("\\n" * (line - 1) + source, PAGE, "exec"), namespace)
    namespace.clear()
"""


class Block(NamedTuple):
    """A fenced block.

    Attributes
    ----------
    line : int
        Of the page, where its text begins.
    kind : str
        What stands behind the backticks.
    source : str
    """

    line: int
    kind: str
    source: str


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks_of(page: Path) -> list[Block]:
    text = text_of(page)
    return [Block(text.count("\n", 0, match.start()) + 2, match["info"], match["body"])
            for match in FENCE.finditer(text)]


def prose_of(page: Path) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", text_of(page))


def anchors_of(page: Path) -> set[str]:
    """What the headings of a page can be linked to by, after the rules of GitHub."""
    headings = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def program_of(page: Path, kind: str) -> tuple[str, list[str]]:
    """A program that runs the blocks of one kind on a page, and the lines that it prints; ("", []) without blocks."""
    before = "" if page in (README, GUIDE) else "".join(
        block.source for block in blocks_of(GUIDE) if block.kind == "python prelude")
    blocks, printed = [], []
    for block in blocks_of(page):
        if block.kind == kind or (kind == "python" and block.kind == "python prelude"):
            blocks.append((block.line, before, block.source))
            printed += [f"block {block.line}", *re.findall(r"# -> (.*)$", block.source, re.MULTILINE)]
        if block.kind == "python prelude":
            before += block.source
    return (f"PAGE = {name_of(page)!r}\nBLOCKS = {blocks!r}\n{RUN}" if blocks else ""), printed
