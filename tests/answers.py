"""Helpers for tests of answers: what is derived from them, how they are rejected, and what a project holds of them."""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import yaml
from conftest import CONTEXT, TEMPLATE
from cookiecutter.generate import generate_context
from cookiecutter.prompt import prompt_for_config

# Names, each with the slug that is offered for it.
DEFAULT_SLUGS = {
    "My Experiment": "my-experiment",
    "  Über  Netz 2!": "uber-netz-2",
    "東京": "dong-jing",
    "🔥": "my-experiment",
    "!!!": "my-experiment",
    '"': "my-experiment",
    "2024 Results": "experiment-2024-results",
    "Test": "my-test",
    "torch": "my-torch",
    "Typing Extensions": "my-typing-extensions",
    "Class": "my-class",
    "word " * 100: "word-word-word-word-word-word-word-word-word",
}
COOKIECUTTER = Path(sys.executable).with_name("cookiecutter")


def derive(**answers: str) -> dict[str, Any]:
    """Return what cookiecutter renders a project with, given these answers and `--no-input`."""
    context = generate_context(str(TEMPLATE / "cookiecutter.json"), extra_context=answers)
    return prompt_for_config(context, no_input=True)


def answers_of(command: str) -> dict[str, str]:
    """Return the answers in a command that was printed because others were rejected."""
    words = shlex.split(command)
    assert words[0] == "cookiecutter"
    return dict(word.split("=", 1) for word in words[words.index("--no-input") + 1 :])


def ask(folder: Path, **answers: str) -> subprocess.CompletedProcess[str]:
    """Run cookiecutter with these answers, and render into ``folder``/out."""
    words = [COOKIECUTTER, TEMPLATE, "--no-input", "--output-dir", "out"]
    words += [f"{name}={answer}" for name, answer in answers.items()]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120)


def retry(folder: Path, rejected: subprocess.CompletedProcess[str]) -> Path:
    """Check that answers were rejected in one line, and nothing written; run the command below it as it is printed."""
    assert rejected.returncode == 1
    error, command = rejected.stderr.splitlines()
    assert error.startswith("error: ") and not rejected.stdout
    assert not list(folder.iterdir())
    words = [str(COOKIECUTTER), *shlex.split(command)[1:]]
    result = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return only_project(folder)


def only_project(folder: Path) -> Path:
    """Return the only thing that was rendered into ``folder``/out."""
    (project,) = (folder / "out").iterdir()
    assert [path.name for path in folder.iterdir()] == ["out"]
    return project


def check_project(project: Path, name: str, author: str, slug: str, description: str = "") -> None:
    """Check that the files of a project parse, and hold exactly these answers."""
    description = description or CONTEXT["description"]
    assert project.name == slug
    assert (project / "src" / slug.replace("-", "_") / "train.py").exists()
    assert (project / "README.md").read_text().splitlines()[:3] == [f"# {name}", "", description]
    module = ast.parse((project / "src" / slug.replace("-", "_") / "__init__.py").read_text())
    assert ast.get_docstring(module, clean=False) == description
    copyright_lines = [line for line in (project / "LICENSE").read_text().splitlines() if "Copyright (c)" in line]
    assert copyright_lines[0].split(" ", 3)[3] == author
    settings = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    assert (settings["name"], settings["description"]) == (slug, description)
    assert settings["authors"] == [{"name": author}]
    if (project / ".devcontainer.json").exists():
        assert json.loads((project / ".devcontainer.json").read_text())["name"] == name
    citation = yaml.safe_load((project / "CITATION.cff").read_text())
    assert (citation["title"], citation["abstract"], citation["authors"]) == (name, description, [{"name": author}])
    for path in project.rglob("*.y*ml"):
        assert all(isinstance(document, dict) for document in yaml.safe_load_all(path.read_text()))
