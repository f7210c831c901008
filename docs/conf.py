"""How Sphinx builds these pages: ``make docs``. Needs no network, so that it gives the same everywhere."""

import os
import re
from pathlib import Path
from tomllib import loads

DOCS = Path(__file__).parent.resolve()
ROOT = DOCS.parent
ABOUT = loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = ABOUT["name"]
version = release = ABOUT["version"]
copyright = "the authors of dataloader_rs"

extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc"]

# ---- pages ----

# GitHub links a heading by the same anchors, so that links within the pages hold in both places.
myst_heading_anchors = 3
# The first word after ``` is the language; further ones tell the test suite what to do with a block.
suppress_warnings = ["myst.header"]  # CHANGELOG.md and others are included as they stand


# Pages of the project, and the pages here that include them.
INCLUDED_BY = {
    "README.md": "index.md", "BENCH.md": "benchmarks.md", "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md", "RELIABILITY.md": "reliability.md",
}


def relinked(text, source, page):
    """The text of a file, which links files as they lie in the project, with its links as a page needs them."""
    def link(match):
        target = Path(os.path.normpath(source.parent / match[1]))
        if not target.exists():
            return match[0]  # an address, or code
        if target.parent == ROOT and target.name in INCLUDED_BY:
            target = DOCS / INCLUDED_BY[target.name]
        return f"]({os.path.relpath(target, page.parent)}{match[2]})"

    return re.sub(r"\]\(([^()#\s]+)((?:#[^()\s]*)?)\)", link, text)


def setup(app):
    def relink_page(app, docname, content):
        page = Path(app.env.doc2path(docname))
        content[0] = relinked(content[0], page, page)

    def relink_included(app, included, docname, content):
        content[0] = relinked(content[0], DOCS / included, Path(app.env.doc2path(docname)))

    app.connect("source-read", relink_page)
    app.connect("include-read", relink_included)


# ---- API, from the docstrings ----

# `name` in a docstring is a link where it is the name of something here, and only set off where it is an argument.
default_role = "autolink"
autodoc_typehints = "none"  # the docstrings say more
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
# All checks of numpydoc but these, which are about taste, or ask for sections that would say nothing.
numpydoc_validation_checks = {
    "all",
    "GL01",  # the summary begins on the line of the quotes, not below
    "GL02",  # ... and a docstring of one line ends there
    "ES01",  # a summary may be all there is to say
    "SA01",  # the text links what belongs together
    "EX01",  # what needs a program around it is shown in the guide
    "SS05",  # "Loads the batches" is what a class does
}

numpydoc_validation_exclude = {r"\.WorkerInfo$"}  # nobody makes one, so it has attributes and no parameters

# Arguments that have the name of a module or of an attribute as well.
nitpick_ignore = [("py:obj", name) for name in ("dataset", "id", "num_threads", "sampler")]
# Names of other projects in docstrings. Their pages are not asked for: a build must not depend on the network.
nitpick_ignore_regex = [("py:.*", r"(threading|numpy|random|sys|torch|contextvars)\..*"),
                        ("py:.*", r"(str|int|float|complex|bytes|dict|object|RuntimeError)")]

# ---- looks ----

html_theme = "pydata_sphinx_theme"
html_title = f"dataloader_rs {version}"
html_copy_source = False
html_theme_options = {"show_prev_next": True, "navigation_with_keys": False, "secondary_sidebar_items": ["page-toc"]}
