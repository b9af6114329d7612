"""Asks for a project on cookiecutter's command line, and checks that it holds exactly the given answers."""

from __future__ import annotations

import ast
import functools
import json
import os
import shlex
import subprocess
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from conftest import BIN, CONTEXT, TEMPLATE

COOKIECUTTER = str(BIN / "cookiecutter")


def ask(folder: Path, **answers: Any) -> subprocess.CompletedProcess[str]:
    """Render into ``folder``/out, with answers on the command line."""
    return call(folder, "--no-input", *(f"{name}={answer}" for name, answer in answers.items()))


def configure(folder: Path, **answers: Any) -> subprocess.CompletedProcess[str]:
    """Render into ``folder``/out, with answers in a file of the user's settings."""
    file = folder.with_name(f"{folder.name}.yaml")
    file.write_text(yaml.safe_dump(settings() | {"default_context": answers}))
    return call(folder, "--no-input", "--config-file", str(file))


def replay(folder: Path, **answers: Any) -> subprocess.CompletedProcess[str]:
    """Render into ``folder``/out from the record of a default project, in which values have been edited."""
    return call(folder, "--replay-file", str(edit_replay(folder, answers)))


def edit_replay(folder: Path, changes: dict[str, Any], without: Iterable[str] = ()) -> Path:
    """Write the record of a default project, with some values changed and others left out, beside a folder."""
    record = json.loads(replay_of_the_default())
    context = record["cookiecutter"] | changes
    record["cookiecutter"] = {name: value for name, value in context.items() if name not in without}
    file = folder.with_name(f"{folder.name}.json")
    file.write_text(json.dumps(record))
    return file


@functools.cache
def replay_of_the_default() -> str:
    """Return what cookiecutter has recorded of a default project."""
    with tempfile.TemporaryDirectory() as folder:
        assert ask(Path(folder)).returncode == 0
    return (Path(settings()["replay_dir"]) / f"{TEMPLATE.name}.json").read_text()


def settings() -> dict[str, Any]:
    """Return the settings of cookiecutter that tests run with."""
    content: dict[str, Any] = yaml.safe_load(Path(os.environ["COOKIECUTTER_CONFIG"]).read_text())
    return content


def call(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Call cookiecutter, which renders into ``folder``/out, and has nobody to ask."""
    command = [COOKIECUTTER, str(TEMPLATE), "--output-dir", "out", *words]
    nobody = subprocess.DEVNULL
    return subprocess.run(command, cwd=folder, stdin=nobody, capture_output=True, text=True, timeout=120)


def answers_of(command: str) -> dict[str, str]:
    """Return the answers in a command that was printed because others were rejected."""
    words = shlex.split(command)
    assert words[0] == "cookiecutter"
    return dict(word.split("=", 1) for word in words[words.index("--no-input") + 1 :])


def retry(folder: Path, rejected: subprocess.CompletedProcess[str]) -> Path:
    """Check that answers were rejected in one line, and nothing written; run the command below it as it is printed."""
    assert rejected.returncode == 1
    error, command = rejected.stderr.splitlines()
    assert error.startswith("error: ") and not rejected.stdout and not list(folder.iterdir())
    words, home = [COOKIECUTTER, *shlex.split(command)[1:]], os.environ | {"HOME": str(folder.parent)}
    result = subprocess.run(words, cwd=folder, env=home, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return only_project(folder)


def only_project(folder: Path) -> Path:
    """Return the only thing that was rendered into ``folder``/out."""
    assert [path.name for path in folder.iterdir()] == ["out"]
    (project,) = (folder / "out").iterdir()
    return project


def recorded(project: Path) -> dict[str, str]:
    """Return the choices that a project was rendered with."""
    return tomllib.loads((project / "pyproject.toml").read_text())["tool"]["ddp-template"]


def check_project(project: Path, **answers: str) -> None:
    """Check that the files of a project parse, and hold exactly these answers, without blanks around them."""
    texts = {name: CONTEXT[name] for name in ("project_name", "description", "author")} | answers
    name, description, author, slug = (text.strip() for text in texts.values())
    package = project / "src" / slug.replace("-", "_")
    assert project.name == slug and (package / "train.py").exists()
    assert (project / "README.md").read_text().splitlines()[:3] == [f"# {name}", "", description]
    assert ast.get_docstring(ast.parse((package / "__init__.py").read_text()), clean=False) == description
    (line,) = [line for line in (project / "LICENSE").read_text().splitlines() if "Copyright (c)" in line]
    assert line.split(" ", 3)[3] == author
    settings = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    assert (settings["name"], settings["description"]) == (slug, description)
    assert settings["authors"] == [{"name": author}]
    for path in project.rglob("*.json"):
        json.loads(path.read_text())
    for path in project.rglob("*.y*ml"):
        assert all(isinstance(document, dict) for document in yaml.safe_load_all(path.read_text()))
