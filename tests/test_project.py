"""The make targets of a rendered project in its own environment, its own tests, and `make demo`."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from answers import DEFAULT_SLUGS
from conftest import CHOICES, ENVIRONMENT, Bake, copy_tracked, run

pytestmark = pytest.mark.slow


# Answers that add packages to install, files to lint and files that git must ignore.
ANSWERS = {"cluster": "kubernetes", "tracker": "tensorboard", "docker": True, "license": "Proprietary"}
# This combination gets an environment of its own; the others are tested in the environment of these tests.
INSTALLED = ("ddp", "digits")


def test_setup_lint_test_and_train_work_in_a_rendered_project(bake: Bake) -> None:
    parallelism, task = INSTALLED
    project = bake(parallelism=parallelism, task=task, **ANSWERS)
    log = project.parent / "pip.log"
    run("make", "setup", "UV=", cwd=project, PYTHON="python3", PIP_LOG=str(log))  # Without uv.
    assert list_distributions(project, log) - read_constraints(project) == set()
    assert (project / ".git" / "hooks" / "pre-commit").exists()
    run("git", "add", "--all", cwd=project)
    tracked = run("git", "ls-files", cwd=project).stdout.splitlines()
    assert not [path for path in tracked if ".venv" in path or "__pycache__" in path]
    run("make", "lint", cwd=project)
    run("git", "diff", "--exit-code", cwd=project)  # The hooks changed no file.
    result = run("make", "test", cwd=project)
    assert_none_skipped(result.stdout)
    run("make", "train", cwd=project, NPROC="2")
    assert (project / "runs" / "default" / "curves.png").exists()

    # Within a larger repository, `make lint` fixes the project's files and no others.
    shutil.rmtree(project / ".git")
    run("git", "init", "--quiet", cwd=project.parent)
    own, other = next((project / "src").iterdir()) / "model.py", project.parent / "other.py"
    clean_source, unused_import = own.read_text(), "import  os\n"
    own.write_text(clean_source + unused_import)
    other.write_text(unused_import)
    run("git", "add", "other.py", cwd=project.parent)
    run("make", "lint", cwd=project)
    assert own.read_text() == clean_source
    assert other.read_text() == unused_import


def list_distributions(project: Path, log: Path) -> set[str]:
    """Return `name==version` of what is in the environment, and of what pip's log says that it was built with."""
    pip = run(project / ".venv/bin/pip", "list", "--format=freeze", "--exclude-editable", "--exclude=pip", cwd=project)
    built_with = [line.split() for line in re.findall("Successfully installed (.*)", log.read_text())]
    words = pip.stdout.split() + ["==".join(word.rsplit("-", 1)) for line in built_with for word in line]
    found = {normalize(word) for word in words} - {f"{project.name}==0.1.0"}
    # PyTorch itself fixes the versions of the packages that its build for CUDA needs.
    return {word for word in found if not word.startswith(("nvidia-", "cuda-", "triton=="))}


def read_constraints(project: Path) -> set[str]:
    """Return the lines of constraints.txt, normalized."""
    lines = (project / "constraints.txt").read_text().splitlines()
    return {normalize(line) for line in lines if not line.startswith("#")}


def normalize(requirement: str) -> str:
    """Return `name==version` with the index's spelling of the name, without a local version such as `+cpu`."""
    name, _, version = requirement.partition("==")
    return f"{re.sub('[-_.]+', '-', name).lower()}=={version.partition('+')[0]}"


def assert_none_skipped(output: str) -> None:
    """Assert that the last line of pytest's output says that tests passed; only those for GPUs are left out."""
    assert re.search(r"^\d+ passed, \d+ deselected in", output.splitlines()[-1].strip("= ")), output


def combinations() -> Iterator[Any]:
    """Yield each strategy with each task, and a name from which a slug is not easy to derive.

    One of them is among the long tests; the others are left to `make test-weekly`.
    """
    names = itertools.cycle([*DEFAULT_SLUGS][1:])
    for shift in (1, 2, 0):
        for number, parallelism in enumerate(CHOICES["parallelism"]):
            task = CHOICES["task"][(number + shift) % len(CHOICES["task"])]
            is_weekly = shift != 1 or parallelism != "pipeline"
            if (parallelism, task) != INSTALLED:
                yield pytest.param(parallelism, task, next(names), marks=[pytest.mark.weekly] if is_weekly else [])


@pytest.mark.parametrize(("parallelism", "task", "name"), [*combinations()])
def test_every_strategy_and_task_passes_its_own_tests(bake: Bake, parallelism: str, task: str, name: str) -> None:
    launcher = "spawn" if task == "digits" else "torchrun"
    project = bake(parallelism=parallelism, task=task, launcher=launcher, project_name=name)
    assert_none_skipped(run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", cwd=project).stdout)


@pytest.mark.parametrize("parallelism", ["ddp", "data_parallel"])
def test_without_a_gpu_its_tests_are_skipped_with_the_reason(bake: Bake, parallelism: str) -> None:
    project = bake(parallelism=parallelism)
    (project / ".venv").symlink_to(ENVIRONMENT)
    words = ["make", "test-gpu", "--assume-old=.venv/installed"]
    output = run(*words, cwd=project, CUDA_VISIBLE_DEVICES="").stdout
    reasons = set(re.findall(r"^SKIPPED .*?: (.*)$", output, re.MULTILINE))
    assert reasons == {"no CUDA device"} | ({"needs 2 CUDA devices"} if parallelism == "ddp" else set())
    assert re.search(r"^\d+ skipped in", output.splitlines()[-1].strip("= ")), output


def test_setup_does_not_change_a_larger_repository(bake: Bake, tmp_path: Path) -> None:
    run("git", "init", "--quiet", cwd=tmp_path)
    project = bake()
    (project / ".venv" / "bin").mkdir(parents=True)
    (project / ".venv" / "installed").touch()
    result = run("make", "setup", cwd=project)
    assert "part of a larger git repository" in result.stdout
    assert not (project / ".git").exists()
    assert not (tmp_path / ".git" / "hooks" / "pre-commit").exists()


def test_make_demo_trains_and_evaluates_a_project(tmp_path: Path) -> None:
    """The copy has only tracked files, and uses this environment so that `make demo` does not create one."""
    copy_tracked(tmp_path)
    (tmp_path / ".venv").symlink_to(ENVIRONMENT)
    assert (ENVIRONMENT / "installed").exists(), "make did not make the environment of these tests"
    for name in ("requirements.txt", "{{cookiecutter.project_slug}}/constraints.txt"):
        os.utime(tmp_path / name, (0, 0))  # Older than the environment, which is up to date for make.
    words = ["make", "demo", "launcher=spawn", 'project_name=It\'s "mine" & $HOME']
    result = run(*words, cwd=tmp_path)
    accuracy = float(re.search(r"test accuracy ([\d.]+) on all 360 samples", result.stdout)[1])
    assert accuracy >= 0.97
    assert "first step done" in result.stdout
    assert "make setup" in result.stdout.split("Next:")[1]
    project = next((tmp_path / "demo").iterdir())
    assert (project / "src" / project.name.replace("-", "_") / "launch" / "spawn.py").exists()
