"""A proof that the proof can fail: each planted fault makes the test fail that has to catch it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, Bake, copy_tracked, run
from conftest import TEMPLATE as ROOT
from mutants import PROJECT, TEMPLATE, Mutant
from runs import replace_once

# `make test-mutants` plants all of them, `make test-long` ten.
SAMPLE = [*PROJECT, *TEMPLATE][6::17]
# What a fault leaves that is no longer valid Python, or does not fit the code around it: it would prove nothing.
ROTTEN = r"\b(NameError|ImportError|ModuleNotFoundError|SyntaxError|IndentationError|AttributeError|TypeError): "
# As pytest's summary shows an assertion, and pytest.raises without an exception.
CAUGHT = r"AssertionError\b|assert |Failed: "


def parameters(mutants: dict[str, Mutant]) -> list[object]:
    """Return the names of faults, those in the sample marked as slow tests."""
    marks = {name: [pytest.mark.mutant, *([pytest.mark.slow] if name in SAMPLE else [])] for name in mutants}
    return [pytest.param(name, marks=marks[name]) for name in mutants]


def run_tests(folder: Path, mutants: Iterable[Mutant]) -> subprocess.CompletedProcess[str]:
    """Run the tests that have to catch faults, in a project or in a copy of the template."""
    tests = sorted({tuple(mutant.test.split("::")) for mutant in mutants})
    files = sorted({f"tests/{file}" for file, _ in tests})
    selection = " or ".join(f"({words})" for _, words in tests)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rf", "-p", "no:cacheprovider", *files, "-k", selection]
    # The summary shortens its lines to the width of the terminal.
    environment = os.environ | {"COLUMNS": "300"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1800)


def assert_caught(mutant: Mutant, done: subprocess.CompletedProcess[str]) -> None:
    """Assert that the mutant's test failed, and that an assertion did it, not what any broken program does."""
    file, selection = mutant.test.split("::")
    output = f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == 1, output
    (failed,) = re.findall(r"^FAILED (.*)$", done.stdout, re.MULTILINE) or [output]
    assert re.match(rf"tests/{file}::\w*{name_in(selection)}\w*(\[.*\])? - ({CAUGHT})", failed), output
    # What a program says of itself in a warning, it has survived.
    rotten = [line for line in done.stdout.splitlines() if re.search(ROTTEN, line) and "warning: " not in line]
    assert not rotten, output


def name_in(selection: str) -> str:
    """Return the part of a test's name that a selection begins with."""
    return selection.split(" and ")[0]


def copy_template(folder: Path) -> Path:
    """Copy the template into a git repository, with the same environment."""
    copy_tracked(folder)
    run("git", "init", "--quiet", cwd=folder)
    run("git", "add", "--all", cwd=folder)
    (folder / ".venv").symlink_to(ENVIRONMENT)
    return folder


@pytest.mark.parametrize("name", parameters(PROJECT))
def test_a_project_catches_a_fault(bake: Bake, name: str) -> None:
    mutant = PROJECT[name]
    project = bake(**mutant.answers)
    replace_once(project / mutant.file, mutant.old, mutant.new)
    assert_caught(mutant, run_tests(project, [mutant]))


@pytest.mark.parametrize("name", parameters(TEMPLATE))
def test_the_template_catches_a_fault(tmp_path: Path, name: str) -> None:
    mutant, copy = TEMPLATE[name], copy_template(tmp_path)
    replace_once(copy / mutant.file, mutant.old, mutant.new)
    assert_caught(mutant, run_tests(copy, [mutant]))


BY_ANSWERS: dict[str, list[Mutant]] = {}
for planted in PROJECT.values():
    BY_ANSWERS.setdefault(json.dumps(planted.answers), []).append(planted)


@pytest.mark.mutant
@pytest.mark.parametrize("answers", BY_ANSWERS)
def test_a_project_without_a_fault_passes(bake: Bake, answers: str) -> None:
    done = run_tests(bake(**json.loads(answers)), BY_ANSWERS[answers])
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"


@pytest.mark.mutant
@pytest.mark.parametrize("file", sorted({mutant.test.split("::")[0] for mutant in TEMPLATE.values()}))
def test_the_template_without_a_fault_passes(tmp_path: Path, file: str) -> None:
    done = run_tests(copy_template(tmp_path), [each for each in TEMPLATE.values() if each.test.startswith(file)])
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"


def test_every_fault_can_be_planted_and_its_test_exists(baked: Bake) -> None:
    assert len(PROJECT) + len(TEMPLATE) >= 80
    planted = [(baked(**mutant.answers), name, mutant) for name, mutant in PROJECT.items()]
    for folder, name, mutant in [*planted, *((ROOT, *item) for item in TEMPLATE.items())]:
        assert (folder / mutant.file).read_text().count(mutant.old) == 1, name
        assert mutant.old != mutant.new, name
        file, selection = mutant.test.split("::")
        tests = re.findall(r"^def (test_\w+)", (folder / "tests" / file).read_text(), re.MULTILINE)
        assert [test for test in tests if name_in(selection) in test], f"{name}: {file} has no test {selection}"
