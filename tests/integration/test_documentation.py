"""The examples of the documentation that need torch."""

from pathlib import Path

import pytest
from documentation import PAGES, name_of, program_of
from same_batches import library

library("torch")


@pytest.mark.parametrize("page", [page for page in PAGES if program_of(page, "python torch")[0]], ids=name_of)
def test_examples_that_need_torch_run(page: Path, capsys):
    """Each prints its `# ->` lines. In this process: to import torch takes longer than all of them."""
    program, printed = program_of(page, "python torch")
    exec(program, {})
    assert capsys.readouterr().out.splitlines() == printed
