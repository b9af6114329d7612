"""A proof that the proof can fail: each planted fault makes the test fail that has to catch it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, Bake, copy_tracked, run
from mutants import PROJECT, TEMPLATE, Mutant
from runs import replace_once

# `make test-mutants` plants all of them, `make test-long` every seventh.
SAMPLE = [*PROJECT, *TEMPLATE][::7]


def parameters(mutants: dict[str, Mutant]) -> list[object]:
    """Return the names of faults, those in the sample marked as slow tests."""
    marks = {name: [pytest.mark.mutant, *([pytest.mark.slow] if name in SAMPLE else [])] for name in mutants}
    return [pytest.param(name, marks=marks[name]) for name in mutants]


def assert_a_test_fails(folder: Path, *words: str) -> None:
    """Assert that a test failed: exit code 1, not that of a wrong command line or of a selection without tests."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 1, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("name", parameters(PROJECT))
def test_a_project_catches_a_fault(bake: Bake, name: str) -> None:
    mutant = PROJECT[name]
    project = bake(**mutant.answers)
    replace_once(project / mutant.file, mutant.old, mutant.new)
    assert_a_test_fails(project, f"tests/{mutant.test}")


@pytest.mark.parametrize("name", parameters(TEMPLATE))
def test_the_template_catches_a_fault(tmp_path: Path, name: str) -> None:
    mutant, (file, _, words) = TEMPLATE[name], TEMPLATE[name].test.partition("::")
    copy_tracked(tmp_path)
    run("git", "init", "--quiet", cwd=tmp_path)
    run("git", "add", "--all", cwd=tmp_path)
    (tmp_path / ".venv").symlink_to(ENVIRONMENT)
    replace_once(tmp_path / mutant.file, mutant.old, mutant.new)
    assert_a_test_fails(tmp_path, "-n0", f"tests/{file}", *(["-k", words] if words else []))
