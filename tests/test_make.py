"""What `make` does to the checkout. Knows nothing of what the targets are for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documentation import ROOT

pytestmark = pytest.mark.slow  # about the checkout, not about a wheel


def made(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Make a target for this interpreter; the caller says in which virtual environment."""
    if shutil.which("make") is None or not (ROOT / "Makefile").exists():
        pytest.skip("no make, or no Makefile here")
    return subprocess.run(["make", "-C", str(ROOT), f"PYTHON={sys.executable}", *arguments],
                          capture_output=True, text=True, timeout=50)


def test_virtual_environment_of_somebody_else_is_not_emptied(tmp_path: Path):
    """A folder of the name that `make` uses, but that it has not made, is kept, and the error names it."""
    kept = tmp_path / "venv" / "kept"
    kept.parent.mkdir()
    kept.write_text("of the user")
    told = made("build", f"VENV={kept.parent}", "INSTALL=false")  # were it emptied, nothing would be fetched for it
    assert told.returncode == 2
    assert f"make did not make {kept.parent}" in told.stderr
    assert [kept] == list(kept.parent.iterdir())


@pytest.mark.parametrize("before", [None, "made-by-3.1-of-another"])
def test_virtual_environment_is_made_where_there_is_none_or_that_of_another_interpreter(tmp_path: Path, before):
    """Where there is none, `make` makes one; one that it made with another interpreter it makes anew."""
    environment = tmp_path / "venv"
    if before is not None:
        environment.mkdir()
        (environment / before).touch()
    told = made("-n", "build", f"VENV={environment}")
    assert told.returncode == 0, told.stderr
    assert f"-m venv --clear {environment}" in told.stdout


@pytest.mark.parametrize("environment", ["named", "/a/named"])
def test_virtual_environment_may_be_named_from_the_root(environment):
    """Tools that start others find these, be VENV a path in the checkout or a whole one."""
    told = made("-n", "lint", f"VENV={environment}")
    assert told.returncode == 0, told.stderr
    assert f'PATH="{ROOT / environment}/bin:$PATH"' in told.stdout
