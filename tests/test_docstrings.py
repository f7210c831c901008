"""The examples in docstrings give what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import dataloader_rs

MODULES = ["dataloader_rs"]
MODULES += [f"dataloader_rs.{module.name}" for module in pkgutil.iter_modules(dataloader_rs.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_a_module_give_what_they_say(name: str):
    """Every example runs, in extension modules too, and none that stands in the source is passed by."""
    pytest.importorskip("numpy")
    module = importlib.import_module(name)
    results = doctest.testmod(module, name=name)
    assert results.failed == 0
    source = Path(dataloader_rs.__path__[0], f"{name.rpartition('.')[2]}.py")
    if name == "dataloader_rs":
        source = source.with_name("__init__.py")
    if not source.exists():
        source = source.with_suffix(".pyx")
    if source.exists():  # a wheel holds no Cython sources
        text = source.read_text(encoding="utf-8")
        parts = [source.with_name(part) for part in re.findall(r'^include "(.+)"', text, re.MULTILINE)]
        text += "".join(part.read_text(encoding="utf-8") for part in parts)
        written = doctest.DocTestParser().get_examples(text)
        assert results.attempted == len(written)
