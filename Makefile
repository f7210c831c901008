# What a developer types. PYTHON chooses the interpreter: `make test PYTHON=python3.14t`.
# python3, the default, works in .venv, any other interpreter in a .venv-<version>: one checkout serves all.

PYTHON ?= python3

# Version with ABI flags (3.13t), suffix of extensions, and where the interpreter lives, fit for a file name.
ABOUT := $(shell $(PYTHON) -c 'import sys, sysconfig as s; print("%d.%d" % sys.version_info[:2] + sys.abiflags, \
    s.get_config_var("EXT_SUFFIX"), sys.base_prefix.replace("/", "-").replace(" ", "_"))')
TAG := $(word 1,$(ABOUT))
ifeq ($(TAG),)
    $(error PYTHON=$(PYTHON) does not run)
endif

# How many processes share the suite; 0: the tests run in pytest's own.
JOBS ?= auto

VENV ?= $(if $(filter python3,$(PYTHON)),.venv,.venv-$(TAG))
EXTENSION := dataloader_rs/_core$(word 2,$(ABOUT))
SOURCES := setup.py $(wildcard dataloader_rs/*.pyx dataloader_rs/*.pxd dataloader_rs/*.c dataloader_rs/*.h)
# A virtual environment made by another interpreter lacks this file and is made anew.
MADE := $(VENV)/made-by-$(TAG)$(word 3,$(ABOUT))
TOOLS := $(VENV)/build-requires.txt
INSTALL := $(VENV)/bin/python -m pip install -qq --prefer-binary

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: build test ctest test-integration lint types demo bench bench-count bench-report clean help

build: $(EXTENSION)  ## compile the extension in place, if its sources changed

test: $(VENV)/with-test $(EXTENSION)  ## run the whole suite; ARGS="-k shuffle" goes to pytest
	$(VENV)/bin/python -m pytest -n $(JOBS) $(ARGS)

ctest: $(VENV)/with-test $(EXTENSION)  ## run the C tests only
	$(VENV)/bin/python -m pytest tests/test_c.py $(ARGS)

test-integration: $(VENV)/with-integration $(EXTENSION)  ## test with torch, Lightning and others; installs 1.6 GB
	$(VENV)/bin/python -m pytest tests/integration $(ARGS)

lint: $(VENV)/with-lint  ## look for mistakes and for what is out of style; changes nothing
	$(VENV)/bin/ruff check .
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(VENV)/bin/cython-lint dataloader_rs
	$(VENV)/bin/clang-format --dry-run --Werror $(wildcard dataloader_rs/*.[ch] tests/c/*.[ch])
	$(VENV)/bin/codespell

types: $(VENV)/with-lint $(EXTENSION)  ## check the types of the package, of the examples and of tests/typing
	$(VENV)/bin/mypy
	$(VENV)/bin/basedpyright
	PYTHONPATH="$(CURDIR)" $(VENV)/bin/basedpyright --ignoreexternal --verifytypes dataloader_rs
	$(VENV)/bin/python -m mypy.stubtest --concise --allowlist tests/typing/stubtest-allowlist.txt \
	    $(patsubst dataloader_rs/%.pyx,dataloader_rs.%,$(wildcard dataloader_rs/*.pyx))

demo: $(VENV)/with-demo $(EXTENSION)  ## train on the digits images
	$(VENV)/bin/python examples/digits.py

bench: $(VENV)/with-bench $(EXTENSION)  ## compare loaders; CASES=overhead,files for some, TORCH=1 for torch anywhere
	$(VENV)/bin/python benchmarks/bench.py $(if $(CASES),--cases $(CASES)) $(if $(TORCH),--torch) $(ARGS)

bench-count: $(EXTENSION)  ## count instructions for each item under callgrind; UPDATE=1 makes them the baseline
	$(VENV)/bin/python benchmarks/count.py $(if $(UPDATE),--update)

bench-report: $(VENV)/with-bench  ## render BENCH.md from the results that are kept
	$(VENV)/bin/python benchmarks/report.py

clean:  ## remove all that was built; the virtual environments stay
	rm -rf build dist *.egg-info .pytest_cache dataloader_rs/*.so
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

help:  ## list these targets
	@sed -n 's/^\([a-z-]*\):.*  ## /\1\t/p' Makefile

$(MADE):
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(TOOLS): pyproject.toml $(MADE)
	@$(VENV)/bin/python -c 'import tomllib; \
	    print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' >$@
	$(INSTALL) -r $@

# Of all that the demo installs little is imported, and what is compiles itself: installing takes half as long.
$(VENV)/with-demo: INSTALL += --no-compile

# The editable install with one of the extras of pyproject.toml; it compiles the extension, too.
$(VENV)/with-%: pyproject.toml $(TOOLS)
	$(INSTALL) --no-build-isolation -e '.[$*]'
	@touch $@

$(EXTENSION): $(SOURCES) | $(TOOLS)
	$(VENV)/bin/python setup.py -q build_ext --inplace
	@touch $@
