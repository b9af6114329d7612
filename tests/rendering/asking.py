"""Asks for a project on cookiecutter's command line, and checks that it holds exactly the given answers."""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import yaml
from conftest import BIN, CONTEXT, TEMPLATE

COOKIECUTTER = str(BIN / "cookiecutter")


def ask(folder: Path, **answers: Any) -> subprocess.CompletedProcess[str]:
    """Render into ``folder``/out."""
    words = [COOKIECUTTER, str(TEMPLATE), "--no-input", "--output-dir", "out"]
    words += [f"{name}={answer}" for name, answer in answers.items()]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120)


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
    words = [COOKIECUTTER, *shlex.split(command)[1:]]
    result = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120)
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
