"""Shared fixtures: projects rendered from checked answers, without the user's own cookiecutter settings."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cookiecutter.main import cookiecutter
from xdist.scheduler import LoadScopeScheduling

TEMPLATE = Path(__file__).parents[1]
ENVIRONMENT = Path(sys.prefix)  # The virtual environment of these tests.
CONTEXT: dict[str, Any] = json.loads((TEMPLATE / "cookiecutter.json").read_text())
QUESTIONS = [name for name in CONTEXT if not name.startswith("_")]
CHOICES: dict[str, list[Any]] = {
    name: [False, True] if isinstance(CONTEXT[name], bool) else CONTEXT[name]
    for name in QUESTIONS
    if isinstance(CONTEXT[name], list | bool)
}
# Sections of the settings that the same code obeys in all projects, of which one is enough.
SHARED = ("run", "data", "optim", "checkpoint", "distributed")
Bake = Callable[..., Path]

pytest_plugins = ["skips"]


def leave_to_weekly(values: Iterable[Any], left: Collection[Any]) -> list[Any]:
    """Return parameters of a test, tuples if it has several, of which those in ``left`` are weekly tests."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else [value]), marks=pytest.mark.weekly)
        if value in left
        else value
        for value in values
    ]


# For what depends little on the strategy: one with replicas, one with shards and one with stages; the others weekly.
STRATEGIES = leave_to_weekly(CHOICES["parallelism"], ("model_parallel", "tensor", "data_parallel"))
# For what takes a minute under each: the one that shards; the others weekly.
ONE_STRATEGY = leave_to_weekly(CHOICES["parallelism"], {*CHOICES["parallelism"]} - {"fsdp"})

# Each test of these files has its own runs.
INDEPENDENT = (
    *("test_effects.py", "test_hostile.py", "test_matrix.py", "test_mutants.py", "test_project.py"),
    *("test_recipes.py", "test_trackers.py"),
)
# The slow files that belong to `make test`, which takes at most ten minutes; the others wait for `make test-long`.
TEN_MINUTES = ("test_matrix.py",)
# The slowest files start first; otherwise one worker would still run them when the others have finished.
SLOWEST = (
    *("test_strategies.py", "test_documents.py", "test_project.py", "test_hostile.py", "test_train.py"),
    *("test_symptoms.py", "test_experiments.py", "test_recipes.py", "test_render.py", "test_matrix.py"),
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests, and mark the long ones, before ``-m`` selects some of them."""
    items.sort(key=lambda item: SLOWEST.index(item.path.name) if item.path.name in SLOWEST else len(SLOWEST))
    for item in items:
        if item.get_closest_marker("slow") and item.path.name not in TEN_MINUTES:
            item.add_marker("weekly" if item.get_closest_marker("weekly") else "long")


class ByFile(LoadScopeScheduling):
    """Run a file's tests on one worker, because they share runs; the tests of some files are independent."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        return nodeid if file.endswith(INDEPENDENT) else file


def pytest_xdist_auto_num_workers() -> int:
    """Return two more than the number of processors, because tests often wait for a killed process or a timeout."""
    return (os.cpu_count() or 1) + 2


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


@pytest.fixture(scope="session", autouse=True)
def isolated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with isolate(tmp_path_factory.mktemp("cookiecutter")):
        yield


@contextmanager
def isolate(folder: Path) -> Iterator[None]:
    """Hide the user's cookiecutter defaults, and the environment of a launcher, from the rendered projects."""
    config = folder / "config.yaml"
    config.write_text(f"cookiecutters_dir: {folder}/templates\nreplay_dir: {folder}/replay\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COOKIECUTTER_CONFIG", str(config))
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NPROC", "PYTHON", "PYTHONPATH", "MAKEFLAGS", "MAKELEVEL"):
            patch.delenv(name, raising=False)
        # Without byte code, every process would compile the project again.
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        # Tests run in parallel: the OpenMP threads of one test would compete with those of another.
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def check_answers(answers: dict[str, Any]) -> None:
    """Check that questions and choices exist; cookiecutter ignores unknown questions, so a typo would go unnoticed."""
    for name, value in answers.items():
        assert name in QUESTIONS, f"no question {name}"
        assert name not in CHOICES or value in CHOICES[name], f"{name} does not offer {value}"


@pytest.fixture
def bake(tmp_path: Path) -> Bake:
    """A function that renders a new project, with hooks, from the answers that differ from the defaults."""

    def render(output: str = "out", **answers: Any) -> Path:
        check_answers(answers)
        return Path(
            cookiecutter(str(TEMPLATE), no_input=True, extra_context=answers, output_dir=str(tmp_path / output))
        )

    return render


@pytest.fixture(scope="module")
def baked(tmp_path_factory: pytest.TempPathFactory) -> Bake:
    """A function that renders each combination once per test file; its runs leave data and byte code in the project."""
    projects: dict[str, Path] = {}

    def render(**answers: Any) -> Path:
        check_answers(answers)
        key = json.dumps(answers, sort_keys=True)
        if key not in projects:
            output = str(tmp_path_factory.mktemp("baked"))
            projects[key] = Path(cookiecutter(str(TEMPLATE), no_input=True, extra_context=answers, output_dir=output))
        return projects[key]

    return render


@pytest.fixture(scope="module")
def plain(baked: Bake) -> Path:
    """The default project, for tests that do not depend on the answers."""
    return baked()


@pytest.fixture
def machines() -> Iterator[Any]:
    """Two machines and the link between them, for one test."""
    from machines import UNAVAILABLE, two_machines  # Imported here, because machines.py imports this file.

    if UNAVAILABLE:
        pytest.skip(UNAVAILABLE)
    with two_machines() as pair:
        yield pair


def read_tree(project: Path) -> dict[str, bytes]:
    """Return the content of every file of a project, by relative path."""
    return {str(p.relative_to(project)): p.read_bytes() for p in sorted(project.rglob("*")) if p.is_file()}


def copy_tracked(folder: Path) -> None:
    """Copy the template's tracked files from the working tree into ``folder``."""
    for name in run("git", "ls-files", cwd=TEMPLATE).stdout.splitlines():
        if (TEMPLATE / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(TEMPLATE / name, folder / name)


def run(*words: str | Path, cwd: Path, expect: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command with this interpreter as PYTHON, check its exit code, and return the completed process."""
    from runs import started  # Imported here, because runs.py imports this file.

    with started(*words, cwd=cwd, **environment) as process:
        stdout, stderr = process.communicate(timeout=1200)
    result = subprocess.CompletedProcess(words, process.returncode, stdout, stderr)
    assert result.returncode == expect, f"{words}: exit code {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result
