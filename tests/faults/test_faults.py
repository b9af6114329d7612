"""Each planted fault fails the test that it names, which shows that tests can fail: ten in `make test-long`."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BIN, TEMPLATE, commit, copy_template, render_copy, run
from faults import FAULTS, plant

pytestmark = pytest.mark.independent

# What a fault leaves that is no program any more would fail every test, and prove nothing.
BROKEN = r"\b(NameError|ImportError|ModuleNotFoundError|SyntaxError|IndentationError|AttributeError)\b"
# The summary of pytest, for an assertion and for an exception that was expected.
CAUGHT = r"(AssertionError|assert |Failed: )"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the template's files in a git repository, with the same environment."""
    commit(copy_template(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def tests() -> set[str]:
    """All tests of the template."""
    return {*run(BIN / "pytest", "--collect-only", "--quiet", "tests", cwd=TEMPLATE).stdout.splitlines()}


@pytest.mark.parametrize("name", FAULTS)
def test_the_text_and_the_test_of_a_fault_are_there(name: str, tests: set[str]) -> None:
    """So that a change of the text is seen at once; whether the test catches the fault, in the long tests."""
    fault = FAULTS[name]
    source = (TEMPLATE / fault.file).read_text()
    planted = plant(fault, source)
    assert planted != source
    if fault.file.endswith(".py"):
        ast.parse(planted)
    if fault.test.startswith("project/"):
        file, function = fault.test.partition("[")[0].removeprefix("project/").split("::")
        assert f"def {function}(" in (TEMPLATE / "{{cookiecutter.project_slug}}" / file).read_text()
    else:
        assert any(test.partition("[")[0] == fault.test or test == fault.test for test in tests)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if fault.is_planted_often else pytest.mark.weekly) for name, fault in FAULTS.items()],
)
def test_a_fault_is_caught_by_the_test_that_it_names(copy: Path, name: str) -> None:
    fault = FAULTS[name]
    (copy / fault.file).write_text(plant(fault, (copy / fault.file).read_text()))
    folder = copy if fault.test.startswith("tests/") else render_copy(copy, copy / "out", **fault.answers)
    words = ["-m", "pytest", "-x", "-q", "-rf", "-p", "no:cacheprovider", fault.test.removeprefix("project/")]
    wide = os.environ | {"COLUMNS": "300"}  # The summary has lines as wide as the terminal.
    done = subprocess.run([sys.executable, *words], cwd=folder, env=wide, capture_output=True, text=True, timeout=900)
    assert done.returncode == 1, f"it survived:\n{done.stdout}\n{done.stderr}"
    (failed,) = re.findall(r"^FAILED (.*)$", done.stdout, re.MULTILINE)
    assert re.search(rf" - {CAUGHT}", failed) and not re.search(BROKEN, done.stdout), done.stdout
