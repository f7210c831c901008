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

# What `make tsan` runs: the tool beside the checkout builds one, if it is there.
TSAN_TOOL := $(wildcard ../shared/tools/free-threaded-python)
TSAN_PYTHON ?= $(if $(TSAN_TOOL),$(shell $(TSAN_TOOL) --tsan))

VENV ?= $(if $(filter python3,$(PYTHON)),.venv,.venv-$(TAG))
# What makes the path whole, for tools that look for others on PATH.
BASE := $(if $(filter /%,$(VENV)),,$(CURDIR)/)
EXTENSION := dataloader_rs/_core$(word 2,$(ABOUT))
SOURCES := setup.py $(foreach kind,pyx pxi pxd c h,$(wildcard dataloader_rs/*.$(kind)))
# A virtual environment made by another interpreter lacks this file and is made anew; one that a person made is not
# touched.
MADE := $(VENV)/made-by-$(TAG)$(word 3,$(ABOUT))
TOOLS := $(VENV)/build-requires.txt
INSTALL := $(VENV)/bin/python -m pip install -qq --prefer-binary
# torch is large, and has its place in `make test-integration`.
EXAMPLES := $(filter-out examples/common.py examples/torch_training.py,$(wildcard examples/*.py))
# Print the list that pyproject.toml has under these keys.
REQUIREMENTS := $(VENV)/bin/python -c 'import functools, operator, sys, tomllib; \
    print(*functools.reduce(operator.getitem, sys.argv[1:], tomllib.load(open("pyproject.toml", "rb"))), sep="\n")'

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: build test ctest exit-matrix load soak ctest-long fuzz tsan asan leaks-debug test-integration lint types docs \
    demo examples wheel sdist wheels upload bench bench-count bench-report clean help

build: $(EXTENSION)  ## compile the extension in place, if its sources changed

test: $(VENV)/with-test $(EXTENSION)  ## run the whole suite; ARGS="-k shuffle" goes to pytest
	$(VENV)/bin/python -m pytest -n $(JOBS) $(ARGS)

ctest: $(VENV)/with-test $(EXTENSION)  ## run the C tests only
	$(VENV)/bin/python -m pytest tests/test_c.py $(ARGS)

exit-matrix: $(VENV)/with-test $(EXTENSION)  ## end processes in all ways and situations, REPEAT=20 times each
	$(VENV)/bin/python -u tests/exit_matrix.py $(if $(REPEAT),--repeat $(REPEAT)) $(ARGS)

load: $(VENV)/with-test $(EXTENSION)  ## large numbers of workers, loaders, batches and threads: some 5 minutes
	$(VENV)/bin/python tests/soak.py load

soak: $(VENV)/with-test $(EXTENSION)  ## random loaders, errors and breaks; MINUTES=30, SEED=1 repeats what it drew
	$(VENV)/bin/python tests/soak.py soak --minutes $(or $(MINUTES),30) $(if $(SEED),--seed $(SEED)) $(ARGS)

fuzz: $(VENV)/with-test $(EXTENSION)  ## run random programs for MINUTES=10; SEED=... repeats a failure
	$(VENV)/bin/python tests/fuzz.py $(or $(MINUTES),10) $(SEED)

ctest-long: $(VENV)/with-test $(EXTENSION)  ## run the C tests with many more rounds and interleavings
	DLRS_C_LONG=1 $(VENV)/bin/python -m pytest tests/test_c.py -o faulthandler_timeout=1800 $(ARGS)

# The interpreter with ThreadSanitizer has a virtual environment of its own, and must not report on pip. The first time
# takes ten minutes more, for that; Cython is run by PYTHON, since under ThreadSanitizer it was not done after 12 minutes.
tsan: $(TOOLS)  ## ThreadSanitizer: the tests in which threads meet; TSAN_PYTHON is a free-threaded CPython that is built with it
	@test -n "$(TSAN_PYTHON)" || { echo "TSAN_PYTHON=... is needed: see CONTRIBUTING.md" >&2; exit 2; }
	TSAN_OPTIONS=report_bugs=0 DLRS_CYTHON_PYTHON="$(BASE)$(VENV)/bin/python" \
	    $(MAKE) sanitize-thread PYTHON="$(TSAN_PYTHON)" VENV=.venv-tsan \
	    INSTALL='$(subst $(VENV)/,.venv-tsan/,$(INSTALL)) --no-compile'

asan: sanitize-address  ## AddressSanitizer and UndefinedBehaviorSanitizer: the suite but for times; ARGS goes to pytest

sanitize-%: $(VENV)/with-test-tools
	$(VENV)/bin/python tests/sanitize.py $* $(ARGS)

leaks-debug: $(VENV)/with-test-tools  ## count all references: PYTHON is a debug build, as Debian's python3.11-dbg
	$(VENV)/bin/python -c 'import sys; sys.gettotalrefcount()'
	$(VENV)/bin/python setup.py -q build_ext --inplace
	$(VENV)/bin/python -m pytest tests/test_leaks.py $(ARGS)

test-integration: $(VENV)/with-integration $(EXTENSION)  ## test with torch, Lightning and others; installs 1.6 GB
	$(VENV)/bin/python -m pytest tests/integration $(ARGS)

docs: $(VENV)/with-docs $(EXTENSION)  ## build the documentation into build/docs; anything doubtful is an error
	$(VENV)/bin/python -m sphinx -q -W --keep-going -n -d build/doctrees docs build/docs $(ARGS)

lint: $(VENV)/with-lint  ## look for mistakes and for what is out of style; changes nothing
	$(VENV)/bin/ruff check .
	PATH="$(BASE)$(VENV)/bin:$$PATH" $(VENV)/bin/cython-lint dataloader_rs dataloader_rs/*.pxi
	$(VENV)/bin/clang-format --dry-run --Werror $(wildcard dataloader_rs/*.[ch] tests/c/*.[ch])
	$(VENV)/bin/codespell
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows $(wildcard .github/workflows/*.yml)

types: $(VENV)/with-lint $(EXTENSION)  ## check the types of the package, of the examples and of tests/typing
	$(VENV)/bin/mypy
	$(VENV)/bin/basedpyright
	PYTHONPATH="$(CURDIR)" $(VENV)/bin/basedpyright --ignoreexternal --verifytypes dataloader_rs
	$(VENV)/bin/python -m mypy.stubtest --concise --mypy-config-file pyproject.toml \
	    --allowlist tests/typing/stubtest-allowlist.txt $(basename $(subst /,.,$(wildcard dataloader_rs/*.pyx)))

demo: $(VENV)/with-demo $(EXTENSION)  ## train on the digits images
	$(VENV)/bin/python examples/digits.py

examples: $(VENV)/with-examples $(EXTENSION)  ## run all examples but the one with torch: a minute
	@set -e; for example in $(EXAMPLES); do echo "== $$example"; $(VENV)/bin/python -W error $$example; echo; done

# What others are given goes to dist; what is made on the way lies below build. A wheel is built from a source
# distribution, in a folder of its own, so that nothing that an earlier build left in the checkout gets into it.
#
# MANYLINUX=2_28 compiles with the clang of zig, against the symbols of glibc 2.28; that needs no container. The command
# that links is given in full, since an interpreter's own may make the wheel search libraries where that was built. The
# sections that nothing needs and the names are 0.9 MB of zig's run-time library.
PLATFORM := $(shell uname -m)
MADE_WHEEL := build/wheel-$(TAG)$(MANYLINUX:%=-%)
WHEELS := build/wheels-$(TAG)
ZIG := $(BASE)$(VENV)/bin/python -m ziglang cc -target $(PLATFORM)-linux-gnu.$(subst _,.,$(MANYLINUX))
BY_ZIG := CC="$(ZIG)" LDSHARED="$(ZIG) -shared" LDFLAGS="-Wl,--gc-sections -Wl,--strip-all"
REPAIR := PATH="$(BASE)$(VENV)/bin:$$PATH" $(VENV)/bin/auditwheel repair --only-plat \
    --plat manylinux_$(MANYLINUX)_$(PLATFORM) -w
CHECKSUMS := cd dist && sha256sum dataloader_rs-* >SHA256SUMS
wheel: $(VENV)/with-release-tools $(MANYLINUX:%=$(VENV)/with-manylinux-tools)
wheel:  ## build a wheel for PYTHON into dist and try it; MANYLINUX=2_28: for any Linux with that glibc
	rm -rf $(MADE_WHEEL) && mkdir -p $(MADE_WHEEL)/whole $(WHEELS) dist
	$(if $(MANYLINUX),$(BY_ZIG)) $(VENV)/bin/python -m build --outdir $(MADE_WHEEL) . >$(MADE_WHEEL)/log 2>&1 || \
	    { tail -n 40 $(MADE_WHEEL)/log; exit 1; }
	grep -q -e ' -O3 ' $(MADE_WHEEL)/log
	! grep -e '-m[a-z]*=native' $(MADE_WHEEL)/log
	$(if $(MANYLINUX),$(REPAIR),cp -t) $(MADE_WHEEL)/whole $(MADE_WHEEL)/*.whl
	$(VENV)/bin/auditwheel show $(MADE_WHEEL)/whole/*.whl
	$(VENV)/bin/python tools/wheel_symbols.py $(if $(MANYLINUX),--glibc $(subst _,.,$(MANYLINUX))) $(MADE_WHEEL)/whole/*.whl
	$(VENV)/bin/twine check --strict $(MADE_WHEEL)/whole/*.whl
	$(VENV)/bin/check-wheel-contents $(MADE_WHEEL)/whole
	@$(REQUIREMENTS) tool cibuildwheel test-requires >$(WHEELS)/requires.txt
	$(VENV)/bin/python -m pip download -qq --prefer-binary -d $(WHEELS) -r $(WHEELS)/requires.txt
	$(VENV)/bin/python tools/try_wheel.py --wheels $(WHEELS) $(ARGS) $(MADE_WHEEL)/whole/*.whl
	cp $(MADE_WHEEL)/whole/*.whl dist
	$(CHECKSUMS)

sdist: $(VENV)/with-release-tools  ## build the source distribution into dist, and try it with pip and gcc alone
	rm -rf build/sdist && mkdir -p build/sdist dist
	$(VENV)/bin/python -m build --sdist --no-isolation --outdir build/sdist . >build/sdist.log 2>&1 || \
	    { tail -n 40 build/sdist.log; exit 1; }
	$(VENV)/bin/twine check --strict build/sdist/*
	$(VENV)/bin/python tools/try_sdist.py build/sdist/*
	cp build/sdist/* dist
	$(CHECKSUMS)

wheels: $(VENV)/with-release-tools  ## build and try all wheels of a release for this system; Linux: in docker
	rm -rf build/cpython-*  # an extension that is there would not be compiled again
	$(VENV)/bin/python -m cibuildwheel --output-dir dist $(ARGS)
	$(VENV)/bin/twine check --strict dist/*.whl
	$(VENV)/bin/check-wheel-contents dist/*.whl

upload: $(VENV)/with-release-tools  ## upload dist to INDEX=url as RELEASE_TAG=v1.2.3, if it is a whole release
	@test -n "$(INDEX)" -a -n "$(RELEASE_TAG)" || { echo "INDEX=url and RELEASE_TAG=v1.2.3 are needed" >&2; exit 2; }
	$(VENV)/bin/python tools/check_release.py "$(RELEASE_TAG)" dist
	$(VENV)/bin/twine check --strict dist/dataloader_rs-*
	$(VENV)/bin/twine upload --non-interactive --repository-url "$(INDEX)" dist/dataloader_rs-*

bench: $(VENV)/with-bench $(EXTENSION)  ## compare loaders; CASES=overhead,files for some, TORCH=1 for torch anywhere
	$(VENV)/bin/python benchmarks/bench.py $(if $(CASES),--cases $(CASES)) $(if $(TORCH),--torch) $(ARGS)

bench-count: $(EXTENSION)  ## count instructions for each item under callgrind; UPDATE=1 makes them the baseline
	$(VENV)/bin/python benchmarks/count.py $(if $(UPDATE),--update)

bench-report: $(VENV)/with-bench  ## render BENCH.md from the results that are kept
	$(VENV)/bin/python benchmarks/report.py

clean:  ## remove all that was built; the virtual environments stay
	rm -rf build dist *.egg-info .hypothesis .pytest_cache .mypy_cache .ruff_cache dataloader_rs/*.so
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

help:  ## list these targets
	@sed -n 's/^\([a-z-]*\):.*  ## /\1\t/p' Makefile

$(MADE):
	@test -n "$(wildcard $(VENV)/made-by-*)" -o ! -e $(VENV) || { \
	    echo "make did not make $(VENV), and would empty it: remove it, or name another one with VENV=..." >&2; exit 2; }
	$(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }
	@touch $@

$(TOOLS): pyproject.toml $(MADE)
	@$(REQUIREMENTS) build-system requires >$@
	$(INSTALL) -r $@

# What an extra names, without the package: where that is not built in the ordinary way, or not needed.
$(VENV)/with-%-tools: pyproject.toml $(TOOLS)
	@$(REQUIREMENTS) project optional-dependencies $* >$(VENV)/$*-requires.txt
	$(INSTALL) --no-compile -r $(VENV)/$*-requires.txt
	@touch $@

# Of all that these install little is imported, and what is compiles itself: installing takes half as long.
$(VENV)/with-demo $(VENV)/with-examples: INSTALL += --no-compile

# The editable install with one of the extras of pyproject.toml; it compiles the extension, too.
$(VENV)/with-%: pyproject.toml $(TOOLS)
	$(INSTALL) --no-build-isolation -e '.[$*]'
	@touch $@

$(EXTENSION): $(SOURCES) | $(TOOLS)
	$(VENV)/bin/python setup.py -q build_ext --inplace
	@touch $@
