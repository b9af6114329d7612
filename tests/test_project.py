"""The user's first hour: a rendered project in an environment of its own, and the two commands of this README."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CHOICES, Bake, copy_tracked, run

pytestmark = pytest.mark.slow


# What else there is to install, to lint and to keep out of git.
ANSWERS = {"cluster": "kubernetes", "tracker": "tensorboard", "docker": True, "license": "Proprietary"}
INSTALLED = ("ddp", "digits")


def test_the_make_targets_of_a_project(bake: Bake) -> None:
    parallelism, task = INSTALLED
    project = bake(parallelism=parallelism, task=task, **ANSWERS)
    run("make", "setup", cwd=project, PYTHON="python3")
    assert (project / ".git" / "hooks" / "pre-commit").exists()
    run("git", "add", "--all", cwd=project)
    clean = run("git", "ls-files", cwd=project).stdout.splitlines()
    assert not [path for path in clean if ".venv" in path or "__pycache__" in path]
    run("make", "lint", cwd=project)
    run("git", "diff", "--exit-code", cwd=project)  # No hook had anything to mend.
    tested = run("make", "test", cwd=project)
    assert re.search(r"^\d+ passed", tested.stdout.splitlines()[-1].strip("= "))
    run("make", "train", cwd=project, NPROC="2")
    assert (project / "runs" / "default" / "curves.png").exists()

    # In a larger repository its own files are mended, and no others.
    shutil.rmtree(project / ".git")
    run("git", "init", "--quiet", cwd=project.parent)
    ours, other = next((project / "src").iterdir()) / "model.py", project.parent / "other.py"
    clean_source, unused = ours.read_text(), "import  os\n"
    ours.write_text(clean_source + unused)
    other.write_text(unused)
    run("git", "add", "other.py", cwd=project.parent)
    run("make", "lint", cwd=project)
    assert ours.read_text() == clean_source
    assert other.read_text() == unused


RENDERED = set(itertools.product(CHOICES["parallelism"], CHOICES["task"]))


@pytest.mark.parametrize(("parallelism", "task"), sorted(RENDERED - {INSTALLED}))
def test_every_strategy_passes_the_tests_that_it_ships(bake: Bake, parallelism: str, task: str) -> None:
    launcher = "spawn" if task == "digits" else "torchrun"
    project = bake(parallelism=parallelism, task=task, launcher=launcher)
    run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", cwd=project)


def test_setup_leaves_a_larger_repository_alone(bake: Bake, tmp_path: Path) -> None:
    run("git", "init", "--quiet", cwd=tmp_path)
    project = bake()
    (project / ".venv" / "bin").mkdir(parents=True)
    (project / ".venv" / "installed").touch()
    done = run("make", "setup", cwd=project)
    assert "part of a larger git repository" in done.stdout
    assert not (project / ".git").exists()
    assert not (tmp_path / ".git" / "hooks" / "pre-commit").exists()


def test_make_demo(tmp_path: Path) -> None:
    """`make demo` on a copy of what git tracks, with this environment in place of one that it would make."""
    copy_tracked(tmp_path)
    environment = Path(shutil.which("pytest", path=str(Path(sys.executable).parent)) or "").parents[1]
    (tmp_path / ".venv").symlink_to(environment)
    (environment / "installed").touch()
    words = ["make", "demo", "launcher=spawn", 'project_name=It\'s "mine" & $HOME']
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    accuracy = float(re.search(r"test accuracy ([\d.]+) on all 360 samples", done.stdout)[1])
    assert accuracy >= 0.97
    assert "first step done" in done.stdout
    assert "make setup" in done.stdout.split("Next:")[1]
    project = next((tmp_path / "demo").iterdir())
    assert (project / "src" / project.name.replace("-", "_") / "launch.py").exists()
