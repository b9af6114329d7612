"""Renders combinations of answers in one process, and keeps the files in memory, each distinct one once.

cookiecutter itself renders, writes and copies. Only its Jinja environment is replaced, by one for all combinations.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from branches import Recorder
from conftest import CHOICES, TEMPLATE
from cookiecutter.generate import is_binary
from cookiecutter.main import cookiecutter

# Names whose slug needs a prefix, which takes branches that the other names do not take.
NAMES = ("Torch", "2024 Results")


class File(NamedTuple):
    """One file of a rendered project."""

    path: str
    content: bytes
    executable: bool

    @property
    def text(self) -> str:
        """The text; of pyproject.toml, without the table of answers."""
        text = self.content.decode()
        return text.split("[tool.ddp-template]")[0] if self.path == "pyproject.toml" else text


class Project(NamedTuple):
    """A combination of answers, and the files that it renders to, by path."""

    answers: dict[str, Any]
    files: dict[str, File]


class Rendering:
    """Combinations of answers, rendered: the projects, the projects of each distinct file, and the branches."""

    def __init__(self, every_license: bool = False) -> None:
        self.recorder = Recorder()
        self.projects: list[Project] = []
        self.owners: dict[File, list[Project]] = {}
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # 150,000 files are written and read, or more.
        with one_environment(self.recorder), tempfile.TemporaryDirectory(dir=memory) as scratch:
            for answers in combinations(every_license):
                self.keep(Project(answers, {}), render(scratch, **answers))
            for name in NAMES:
                render(scratch, project_name=name)

    def keep(self, project: Project, folder: str) -> None:
        """Move the files of a project from its folder into memory."""
        for file in read(folder):
            owners = self.owners.setdefault(file, [])
            owners.append(project)
            project.files[file.path] = owners[0].files.get(file.path, file)  # One object for files that are equal.
        self.projects.append(project)
        shutil.rmtree(folder)

    def texts(self) -> list[File]:
        """Return the distinct files that hold text."""
        return [file for file in self.owners if not file.path.endswith(".npz")]

    def write_each(self, folder: Path, pattern: str) -> list[Path]:
        """Write each distinct file whose path matches to a folder of its own, and return the paths."""
        files = [file for file in self.owners if Path(file.path).match(pattern)]
        assert files, pattern
        return [write([file], folder / str(i)) / file.path for i, file in enumerate(files)]


def combinations(every_license: bool) -> Iterator[dict[str, Any]]:
    """Yield every combination of answers; of the licenses other than the first only those that make a new file.

    All of them would take three times as long.
    """
    for values in itertools.product(*CHOICES.values()):
        answers = dict(zip(CHOICES, values, strict=True))
        is_first = {name: answers[name] == CHOICES[name][0] for name in CHOICES}
        # No file depends on the license and on the launcher or cluster, or on license, strategy and task.
        may_differ = is_first["launcher"] and is_first["cluster"] and (is_first["parallelism"] or is_first["task"])
        if every_license or is_first["license"] or may_differ:
            yield answers


@contextmanager
def one_environment(recorder: Recorder) -> Iterator[None]:
    """Let cookiecutter render many projects with one Jinja environment, which compiles each template once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cookiecutter.prompt.create_env_with_context", lambda context: recorder)
        patch.setattr("cookiecutter.generate.create_env_with_context", lambda context: recorder)
        patch.setattr("cookiecutter.generate.is_binary", functools.cache(is_binary))
        yield


def render(scratch: str, **answers: Any) -> str:
    """Render a project without hooks, and return its folder."""
    return cookiecutter(str(TEMPLATE), no_input=True, extra_context=answers, output_dir=scratch, accept_hooks=False)


def read(project: str | Path) -> Iterable[File]:
    """Yield the files of a rendered project."""
    for folder, _, names in os.walk(project):
        for name in names:
            path = Path(folder, name)
            yield File(str(path.relative_to(project)), path.read_bytes(), os.access(path, os.X_OK))


def write(files: Iterable[File], folder: Path) -> Path:
    """Write files below ``folder``."""
    for file in files:
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.content)
    return folder


def alike(projects: list[Project], question: str) -> list[list[Project]]:
    """Return groups of projects that differ in the answer to one question alone."""
    groups: dict[str, list[Project]] = {}
    for project in projects:
        others = {name: value for name, value in project.answers.items() if name != question}
        groups.setdefault(str(others), []).append(project)
    return list(groups.values())


def different(one: Project, other: Project) -> set[str]:
    """Return the paths whose files differ between two projects."""
    return {path for path in one.files.keys() | other.files.keys() if one.files.get(path) != other.files.get(path)}


def covering(projects: list[Project], wanted: Callable[[File], bool]) -> list[Project]:
    """Return a few projects that together have every distinct file that is wanted."""
    missing = {file for project in projects for file in project.files.values() if wanted(file)}
    chosen = []
    while missing:
        chosen.append(max(projects, key=lambda project: len(missing & set(project.files.values()))))
        missing -= set(chosen[-1].files.values())
    return chosen
