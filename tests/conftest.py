"""Rendering for the tests: strict, isolated from the user's own cookiecutter settings, each combination once."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cookiecutter.main import cookiecutter
from xdist.scheduler import LoadScopeScheduling

TEMPLATE = Path(__file__).parents[1]
CONTEXT: dict[str, Any] = json.loads((TEMPLATE / "cookiecutter.json").read_text())
QUESTIONS = [name for name in CONTEXT if not name.startswith("_")]
CHOICES: dict[str, list[Any]] = {
    name: [False, True] if isinstance(CONTEXT[name], bool) else CONTEXT[name]
    for name in QUESTIONS
    if isinstance(CONTEXT[name], list | bool)
}
Bake = Callable[..., Path]


# Answers that change code: every combination of them is rendered. The others add or change files of their own, as
# test_render.py makes sure, and take turns.
CODE = ("parallelism", "task", "launcher", "tracker")


def combinations() -> Iterator[dict[str, Any]]:
    """Every combination of the answers that change code, with all values of the others among them."""
    code = [CHOICES[name] for name in CODE]
    others = itertools.cycle(itertools.product(*(CHOICES[name] for name in CHOICES if name not in CODE)))
    for values in itertools.product(*code):
        turn = dict(zip((name for name in CHOICES if name not in CODE), next(others), strict=True))
        answers = dict(zip(CODE, values, strict=True)) | turn
        yield {name: answers[name] for name in CHOICES}


def name_of(answers: dict[str, Any]) -> str:
    """What a test with these answers is called: those that are not the default."""
    return "-".join(f"{k}={v}" for k, v in answers.items() if v != CHOICES[k][0]) or "default"


# What takes longest is begun first, or one worker would have it alone in the end.
LONGEST = ("test_strategies.py", "test_project.py", "test_train.py", "test_symptoms.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


class ByFile(LoadScopeScheduling):
    """Beside each other run files, whose tests share runs, and the projects of test_project.py, which share nothing."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        return nodeid if file.endswith("test_project.py") else file


def pytest_xdist_auto_num_workers() -> int:
    """One more than processors: a test often waits for a process that was killed, a link that was cut, a time."""
    return (os.cpu_count() or 1) + 1


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


@pytest.fixture(scope="session", autouse=True)
def isolated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the user's defaults, and the launcher that the tests may run under, out of the renders."""
    folder = tmp_path_factory.mktemp("cookiecutter")
    config = folder / "config.yaml"
    config.write_text(f"cookiecutters_dir: {folder}/templates\nreplay_dir: {folder}/replay\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COOKIECUTTER_CONFIG", str(config))
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NPROC", "PYTHON", "PYTHONPATH", "MAKEFLAGS", "MAKELEVEL"):
            patch.delenv(name, raising=False)
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # Or every process would compile the project anew.
        # Tests run beside each other: threads that wait for those of another test would take turns with them.
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def check_answers(answers: dict[str, Any]) -> None:
    """cookiecutter ignores unknown questions: a test that misspells one would vary nothing."""
    for name, value in answers.items():
        assert name in QUESTIONS, f"no question {name}"
        assert name not in CHOICES or value in CHOICES[name], f"{name} does not offer {value}"


@pytest.fixture
def bake(tmp_path: Path) -> Bake:
    """Render a project of its own for one test, with hooks, from the answers that differ from the defaults."""

    def render(output: str = "out", **answers: Any) -> Path:
        check_answers(answers)
        return Path(
            cookiecutter(str(TEMPLATE), no_input=True, extra_context=answers, output_dir=str(tmp_path / output))
        )

    return render


@pytest.fixture(scope="module")
def baked(tmp_path_factory: pytest.TempPathFactory) -> Bake:
    """The project of one combination, rendered once for the tests of a file: runs leave data and byte code in it."""
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
    """The default project, where the choices make no difference."""
    return baked()


@pytest.fixture
def machines() -> Iterator[Any]:
    """Two machines and the link between them, for one test."""
    from machines import TROUBLE, two_machines  # Which imports this file.

    if TROUBLE:
        pytest.skip(TROUBLE)
    with two_machines() as both:
        yield both


def read_tree(project: Path) -> dict[str, bytes]:
    """Every file of a project: relative path and content."""
    return {str(p.relative_to(project)): p.read_bytes() for p in sorted(project.rglob("*")) if p.is_file()}


def copy_tracked(folder: Path) -> None:
    """Copy what git tracks of the template into ``folder``, as it is in the working tree."""
    for name in run("git", "ls-files", cwd=TEMPLATE).stdout.splitlines():
        if (TEMPLATE / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(TEMPLATE / name, folder / name)


def run(*words: str | Path, cwd: Path, expect: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with this interpreter's environment, and expect its exit code."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=os.environ | {"PYTHON": sys.executable} | environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == expect, f"{words}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done
