"""The examples that need torch or scikit-learn run as a user runs them; tests/test_examples.py runs the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_examples import LIGHT, NEEDS, run_example


@pytest.mark.parametrize("name", sorted(set(NEEDS) - set(LIGHT)))
def test_example_with_a_large_library_runs_in_under_a_minute(name: str, tmp_path: Path):
    """It ends well, warns of nothing, and says how well the model does; it is skipped where a library is missing."""
    printed = run_example(name, tmp_path)
    assert any(line.startswith("accuracy on held-out images: ") for line in printed), printed
