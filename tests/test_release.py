"""What is released is what is promised: wheels, version, workflows. `make wheel` and `make sdist` try theirs."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tomllib

import pytest
from documentation import README, ROOT, text_of

import dataloader_rs

pytestmark = pytest.mark.slow  # about the checkout, not about a wheel

PACKAGE = ROOT / "dataloader_rs"
SETTINGS = tomllib.loads(text_of(ROOT / "pyproject.toml"))
PROJECT = SETTINGS["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

SYSTEMS = {"manylinux_2_28_x86_64": ("manylinux", "x86_64"), "manylinux_2_28_aarch64": ("manylinux", "aarch64"),
           "macosx_11_0_arm64": ("macosx", "arm64")}


# ---- the wheels ----


def promised_wheels() -> dict[str, list[str]]:
    """The table of the README: the versions of CPython that there are wheels for, by the tag of the system."""
    rows = re.findall(r"^\| [^|]+ \| `((?:manylinux|macosx)\w+)` \| ([^|]+) \|$", text_of(README), re.MULTILINE)
    return {tag: versions.split(", ") for tag, versions in rows}


def promised_identifiers() -> set[tuple[str, str, str]]:
    """The cells of that table as interpreter, kind of system and processor."""
    return {(f"cp{version.replace('.', '')}", *SYSTEMS[tag]) for tag, versions in promised_wheels().items()
            for version in versions}


def test_wheels_of_cibuildwheel_are_those_that_the_readme_promises():
    """Each identifier that cibuildwheel prints for the three systems is a cell of the table, and there are no more."""
    assert list(promised_wheels()) == list(SYSTEMS)
    promised = promised_identifiers()
    assert len(promised) == 21
    assert runpy.run_path(str(ROOT / "tools" / "check_release.py"))["identifiers"]() == promised


def test_tags_of_the_wheels_are_those_that_the_readme_promises():
    """The containers are those of glibc 2.28, and the oldest macOS is 11.0."""
    settings = SETTINGS["tool"]["cibuildwheel"]
    for processor in ("x86_64", "aarch64"):
        image = settings["linux"][f"manylinux-{processor}-image"]
        assert f"{image}_{processor}" in promised_wheels()
    target = settings["macos"]["environment"]["MACOSX_DEPLOYMENT_TARGET"]
    assert f"macosx_{target.replace('.', '_')}_arm64" in promised_wheels()


def test_versions_of_python_are_those_of_the_wheels():
    """The classifiers name each version that there is a wheel for, and the oldest one is the least that pip takes."""
    versions = {version.rstrip("t") for versions in promised_wheels().values() for version in versions}
    classifiers = re.findall(r"Python :: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), re.MULTILINE)
    assert set(classifiers) == versions
    assert PROJECT["requires-python"] == f">= {classifiers[0]}"


def test_nothing_compiles_for_the_processor_at_hand():
    """No flag for one kind of processor is in what builds: a wheel has to run on all of them."""
    for path in [*(ROOT / name for name in ("setup.py", "pyproject.toml", "Makefile")), *WORKFLOWS]:
        assert not re.search(r"-(?:march|mtune|mcpu)=(?!'| )", text_of(path)), path


# ---- the source distribution ----

# Cython would take seconds, and is not what is missing.
BUILD = """
import sys, types
sys.modules["Cython"] = types.ModuleType("Cython")
sys.modules["Cython.Build"] = types.ModuleType("Cython.Build")
sys.modules["Cython.Build"].cythonize = lambda extensions, **options: extensions
sys.argv = ["setup.py", "-q", "build_ext"]
exec(compile(open("setup.py").read(), "setup.py", "exec"))
"""


@pytest.mark.parametrize(("compiler", "says"), [
    ("/nowhere/gcc", ["/nowhere/gcc", "apt install gcc", "dnf install gcc", "xcode-select --install", "CC"]),
    ("gcc --no-such-option", ["--no-such-option", "apt install gcc"]),
    ("gcc -nostdinc", ["stdio.h", "apt install python3-dev", "libc6-dev"]),
], ids=["none", "broken", "no headers"])
def test_build_without_a_compiler_says_what_to_install(tmp_path, compiler, says):
    """Who has no compiler, or no headers, is told what to install, and sees no traceback."""
    built = subprocess.run([sys.executable, "-c", BUILD], cwd=ROOT, capture_output=True, text=True, timeout=50,
                           env={**os.environ, "CC": compiler, "DLRS_BUILD_DIR": str(tmp_path)})
    assert built.returncode == 1
    assert built.stderr.startswith("error: ")
    assert [part for part in [*says, "pip install --only-binary"] if part not in built.stderr] == []


# ---- the release ----


def test_version_stands_in_one_place():
    """pyproject.toml has it; the newest release in the changelog is that one, and no source repeats it."""
    version = PROJECT["version"]
    assert re.findall(r"^## (\d\S*)", text_of(ROOT / "CHANGELOG.md"), re.MULTILINE)[0] == version
    assert runpy.run_path(str(ROOT / "docs" / "conf.py"))["release"] == version
    assert dataloader_rs.__version__ in (version, "unknown")  # as the tests may run on what was never installed
    sources = [path for pattern in ("*.py", "*.py[xi]", "*.px[id]", "*.[ch]") for path in PACKAGE.glob(pattern)]
    assert len(sources) > 60
    others = [ROOT / name for name in ("setup.py", "Makefile", "MANIFEST.in", "docs/conf.py")]
    for path in [*sources, *others, *WORKFLOWS, *(ROOT / "tools").glob("*.py")]:
        assert version not in text_of(path), path


def whole_release(version: str, wanted) -> list[str]:
    """Names of files as cibuildwheel makes them."""
    systems = {"manylinux": "manylinux_2_27_{0}.manylinux_2_28_{0}", "macosx": "macosx_11_0_{0}"}
    return [f"dataloader_rs-{version}.tar.gz",
            *(f"dataloader_rs-{version}-{python.rstrip('t')}-{python}-{systems[system].format(processor)}.whl"
              for python, system, processor in wanted)]


def test_only_a_whole_release_is_uploaded():
    """Another tag, a wheel that is missing, one of another version or for this machine only: each is told."""
    faults_of = runpy.run_path(str(ROOT / "tools" / "check_release.py"))["faults_of"]
    version = PROJECT["version"]
    wanted = promised_identifiers()
    files = whole_release(version, wanted)
    usual = set(faults_of(f"v{version}", files, wanted))  # what the changelog has between two releases
    assert all("Unreleased" in fault for fault in usual)

    def more_faults(tag: str, files: list[str]) -> list[str]:
        return [fault for fault in faults_of(tag, files, wanted) if fault not in usual]

    assert more_faults(version, files) == [f"the tag is {version}, and the version of pyproject.toml {version}"]
    assert more_faults(f"v{version}", files[1:]) == ["the source distribution is missing"]
    for name in files[1:]:
        (fault,) = more_faults(f"v{version}", [file for file in files if file != name])
        assert fault.endswith(": 0 wheels")
    for name in (f"dataloader_rs-{version}-cp313-cp313-linux_x86_64.whl", "dataloader_rs-0.9-cp311-cp311-any.whl"):
        assert more_faults(f"v{version}", [*files, name]) == [f"{name} is no part of this release"]


@pytest.mark.parametrize("variables", [[], ["INDEX=https://index.invalid"], ["RELEASE_TAG=v1"]], ids=str)
def test_upload_asks_for_index_and_tag(variables):
    """Without an index nothing is uploaded, and neither is without a tag."""
    recipe = re.search(r"^upload:.*\n\t(.*)", text_of(ROOT / "Makefile"), re.MULTILINE)[1]
    assert "exit 2" in recipe
    values = dict(variable.split("=") for variable in variables)
    command = recipe.lstrip("@").replace("$(INDEX)", values.get("INDEX", "")).replace(
        "$(RELEASE_TAG)", values.get("RELEASE_TAG", ""))
    run = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (2, "INDEX=url and RELEASE_TAG=v1.2.3 are needed\n")


# ---- the workflows and hooks ----


def test_workflows_do_what_people_do():
    """Each command of a workflow is `make` with a target that there is, and the index of a release is a variable."""
    if not WORKFLOWS:
        pytest.skip("needs the repository")
    assert {path.name for path in WORKFLOWS} == {"test.yml", "wheels.yml", "release.yml"}
    targets = set(re.findall(r"^([a-z-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    called = set()
    for path in WORKFLOWS:
        text = text_of(path)
        commands = re.findall(r"\brun: (.*)", text)
        matrix = re.search(r"^ +target: \[(.*)\]", text, re.MULTILINE)
        for command in commands:
            if "${{ matrix.target }}" in command:
                commands += [command.replace("${{ matrix.target }}", target)
                             for target in re.findall(r'[a-z-]+(?: [A-Z]+=\d+)?', matrix[1])]
            else:
                called.add(re.fullmatch(r"make ([a-z-]+)(?: [A-Z_]+=\S+)*", command)[1])
    assert {"test", "lint", "wheel", "wheels", "sdist", "upload", "asan"} <= called <= targets
    release = text_of(ROOT / ".github/workflows/release.yml")
    assert "if: vars.RELEASE_INDEX != ''" in release
    assert "INDEX: ${{ vars.RELEASE_INDEX }}" in release
    assert "pypi.org" not in "".join(text_of(path) for path in WORKFLOWS) + text_of(ROOT / "Makefile")


def test_workflows_test_what_there_are_wheels_for():
    """The suite runs on each version of CPython that there is a wheel for, and on 3.13t."""
    if not WORKFLOWS:
        pytest.skip("needs the repository")
    tested = re.search(r"^ +python: \[(.*)\]", text_of(ROOT / ".github/workflows/test.yml"), re.MULTILINE)[1]
    assert set(re.findall(r'"([\w.]+)"', tested)) == {"3.13t", *promised_wheels()["manylinux_2_28_x86_64"]}


def test_hooks_use_the_versions_of_the_extra():
    """The tools of pre-commit are those of `make lint`."""
    pinned = {requirement for requirement in PROJECT["optional-dependencies"]["lint"] if "==" in requirement}
    hooks = re.findall(r'additional_dependencies: \["(.*)"\]', text_of(ROOT / ".pre-commit-config.yaml"))
    assert len(hooks) == 5
    assert set(hooks) <= pinned


def test_tools_have_one_version():
    """A tool that two extras name is of one version in both."""
    versions: dict[str, set[str]] = {}
    for extra in PROJECT["optional-dependencies"].values():
        for requirement in extra:
            name, _, version = requirement.partition(" == ")
            if version:
                versions.setdefault(name, set()).add(version)
    assert {"cibuildwheel", "ruff"} <= set(versions)
    assert not {name: found for name, found in versions.items() if len(found) > 1}
