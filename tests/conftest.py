"""Shared by all tests: the questions, projects rendered from checked answers, and commands run in them."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from signal import SIGKILL
from textwrap import dedent
from typing import Any
from uuid import uuid4

import pytest
from cookiecutter.main import cookiecutter
from xdist.scheduler import LoadScopeScheduling

TEMPLATE = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
CONTEXT: dict[str, Any] = json.loads((TEMPLATE / "cookiecutter.json").read_text())
QUESTIONS = [name for name in CONTEXT if not name.startswith("_")]
CHOICES: dict[str, list[Any]] = {
    name: [False, True] if isinstance(CONTEXT[name], bool) else CONTEXT[name]
    for name in QUESTIONS
    if isinstance(CONTEXT[name], list | bool)
}
Bake = Callable[..., Path]


@functools.cache
def is_independent(file: str) -> bool:
    """Return whether each test of a file has its own runs; those of another file share some."""
    return "pytest.mark.independent" in (TEMPLATE / file).read_text()


class ByFile(LoadScopeScheduling):
    """Runs the tests of a file on one worker, unless it is marked: xdist's own options have no effect with pytest 9."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        return nodeid if is_independent(file) else file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest tests first, so that no worker waits for one of them at the end."""
    items.sort(key=lambda item: "test_a_project_passes_its_own_tests" not in item.nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


@pytest.fixture(scope="session", autouse=True)
def isolated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide the user's cookiecutter settings, and the environment of a launcher or of make, from rendered projects."""
    folder = tmp_path_factory.mktemp("cookiecutter")
    (folder / "config.yaml").write_text(f"cookiecutters_dir: {folder}/templates\nreplay_dir: {folder}/replay\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COOKIECUTTER_CONFIG", str(folder / "config.yaml"))
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NPROC", "PYTHONPATH", "MAKEFLAGS", "MAKELEVEL"):
            patch.delenv(name, raising=False)
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # Else every process would compile the project again.
        patch.setenv("OMP_NUM_THREADS", "1")  # Tests run in parallel.
        patch.setenv("PYTHON", sys.executable)  # What a project's scripts start.
        yield


def render(folder: Path, hooks: bool = True, **answers: Any) -> Path:
    """Render a project into a folder; rejects unknown questions and values, which cookiecutter ignores."""
    for name, value in answers.items():
        assert name in QUESTIONS, f"no question {name}"
        assert name not in CHOICES or value in CHOICES[name], f"{name} does not offer {value}"
    options: dict[str, Any] = {"extra_context": answers, "output_dir": str(folder), "accept_hooks": hooks}
    return Path(cookiecutter(str(TEMPLATE), no_input=True, **options))


def copy_template(folder: Path) -> Path:
    """Copy the template's files, but none that git ignores, into a new folder, and return it."""
    words = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, run(*words, cwd=TEMPLATE).stdout.split("\0")):
        if (TEMPLATE / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(TEMPLATE / name, folder / name)
    return folder


def render_copy(template: Path, folder: Path, **answers: Any) -> Path:
    """Render a project from a copy of the template, with its own extension."""
    words = [f"{question}={answer}" for question, answer in answers.items()]
    run(BIN / "cookiecutter", template, "--no-input", "--output-dir", folder, *words, cwd=template)
    (project,) = folder.iterdir()
    return project


@pytest.fixture
def bake(tmp_path: Path) -> Bake:
    """A function that renders a new project from the answers that differ from the defaults."""
    return lambda folder="out", **answers: render(tmp_path / folder, **answers)


@pytest.fixture(scope="module")
def baked(tmp_path_factory: pytest.TempPathFactory) -> Bake:
    """A function that renders each combination of answers once per file of tests; runs leave files in the project."""
    projects: dict[str, Path] = {}

    def render_once(**answers: Any) -> Path:
        key = json.dumps(answers, sort_keys=True)
        if key not in projects:
            projects[key] = render(tmp_path_factory.mktemp("baked"), **answers)
        return projects[key]

    return render_once


def blocks(page: Path, language: str) -> list[str]:
    """Return the texts between the fences of a page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def edit(project: Path, changes: dict[tuple[str, str], str]) -> None:
    """Change a line in files of the package; {(file, text in it): text in its place}."""
    for (name, before), after in changes.items():
        file = next((project / "src").iterdir()) / name
        text = file.read_text()
        assert text.count(before) == 1, (name, before)
        file.write_text(text.replace(before, after))


def read_tree(project: Path) -> dict[str, bytes]:
    """Return the content of every file of a project, by its path."""
    return {str(p.relative_to(project)): p.read_bytes() for p in sorted(project.rglob("*")) if p.is_file()}


@contextmanager
def started(*words: str | Path, cwd: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Start a command, and kill what is left of it, in whatever process group, after the ``with`` block.

    All its processes have the variable MARK.
    """
    environment = {"MARK": uuid4().hex, **environment}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([str(word) for word in words], cwd=cwd, env=os.environ | environment, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()
            for pid in find_processes(f"MARK={environment['MARK']}"):
                with suppress(ProcessLookupError):
                    os.kill(pid, SIGKILL)


def commit(folder: Path) -> None:
    """Commit all files of a folder, in a git repository that is created if there is none."""
    identity = ("-c", "user.name=Test", "-c", "user.email=test@example.org")
    run("git", "init", "--quiet", "--initial-branch=main", cwd=folder)
    run("git", "add", "--all", cwd=folder)
    run("git", *identity, "commit", "--quiet", "--no-verify", "--message", "all", cwd=folder)


def run(*words: str | Path, cwd: Path, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command until all that holds its output has ended, and check its exit code."""
    with started(*words, cwd=cwd, **environment) as process:
        out, err = process.communicate(timeout=900)
    assert process.returncode == code, f"{words}: exit code {process.returncode}\n{out}\n{err}"
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def run_python(project: Path, script: str, *words: str | Path) -> str:
    """Run a script with the package of a project; returns what it printed."""
    return run(BIN / "python", "-c", script, *words, cwd=project, PYTHONPATH="src").stdout


TRAINER = """
import sys, torch
from my_experiment.__main__ import parse
from my_experiment.distributed import cleanup, rendezvous, setup
from my_experiment.train import Trainer
_, config, _ = parse(sys.argv[1:])
setup(config, process := rendezvous(config))
trainer = Trainer(config, process)
"""


def run_trainer(project: Path, script: str, *words: str | Path) -> str:
    """Run a script with the trainer of a command, in one process; returns what it printed."""
    return run_python(project, f"{TRAINER}{dedent(script)}\ncleanup(process)", *words)


def launch(project: Path, *words: str | Path, nproc: int = 2, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command of a project on some ranks, with its own launcher."""
    return run(project / "scripts" / "launch.sh", *words, cwd=project, NPROC=str(nproc), **options)


def run_alone(project: Path, *words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command of a project in one process, without its launcher, where the number of ranks plays no part.

    It takes a third of the processor time of two ranks: most of a short run is the import of PyTorch.
    """
    (package,) = (project / "src").iterdir()
    return run(BIN / "python", "-m", package.name, *words, cwd=project, PYTHONPATH="src", **options)


def launch_and_kill(
    project: Path,
    *words: str | Path,
    when: Callable[[], object],
    nproc: int = 2,
    seconds: float = 120,
    **environment: str,
) -> None:
    """Run a command of a project, kill its launcher with SIGKILL once ``when`` is true, and wait for its processes."""
    mark, script = uuid4().hex, project / "scripts" / "launch.sh"
    with started(script, *words, cwd=project, NPROC=str(nproc), **(environment | {"MARK": mark})) as launcher:
        wait_until(lambda: when() or launcher.poll() is not None, "the launcher can be killed", seconds)
        assert launcher.poll() is None, launcher.communicate()
        launcher.kill()
        wait_until(lambda: not find_processes(f"MARK={mark}"), "the ranks, and what they have started, end", 60)


def launch_on_full_disk(project: Path, *words: str) -> str:
    """Run a command on two ranks that cannot write files of over 64 KiB, and fails; returns what it reports."""
    limited = ("bash", "-c", 'ulimit -f 64 && exec scripts/launch.sh "$@"', "bash", *words)
    return run(*limited, cwd=project, code=2, NPROC="2").stderr


def read_records(folder: Path, event: str | None = None) -> list[dict[str, Any]]:
    """Return the complete records in a run's metrics.jsonl, all of them or those of one event."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in records if event in (None, record["event"])]


def read_losses(folder: Path) -> list[float]:
    """Return the losses that a run has logged, of steps 1, 2, ..."""
    records = read_records(folder, "train")
    assert [record["step"] for record in records] == [*range(1, len(records) + 1)]
    return [record["loss"] for record in records]


def weekly(*cases: Any) -> list[Any]:
    """Return cases of a test whose other cases show the same earlier; a tuple has several parameters."""
    return [pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.weekly) for case in cases]


def free_ports(count: int) -> list[int]:
    """Return ports that no program listens at."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def find_processes(variable: str) -> list[int]:
    """Return the processes whose environment has a variable (``NAME=value``), which child processes inherit."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # The process has ended.
            if variable.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


def wait_until(condition: Callable[[], object], what: str, seconds: float = 120) -> None:
    """Wait until a condition is true; fail after a time that no machine should need."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"after {seconds} s, still not: {what}"
        time.sleep(0.005)  # A step of a small model takes some milliseconds.
