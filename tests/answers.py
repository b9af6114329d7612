"""Helpers for tests of answers: what is derived from them, what the hook says, and what a project holds of them."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import yaml
from conftest import TEMPLATE
from cookiecutter.generate import generate_context
from cookiecutter.prompt import prompt_for_config
from cookiecutter.utils import create_env_with_context

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
    """Return the context that cookiecutter renders a project with, given these answers and `--no-input`."""
    context = generate_context(str(TEMPLATE / "cookiecutter.json"), extra_context=answers)
    public = {name: value for name, value in context["cookiecutter"].items() if not name.startswith("_")}
    context["_cookiecutter"] = public
    context["cookiecutter"].update(prompt_for_config(context, no_input=True))
    return context


def load_hook(**answers: str) -> dict[str, Any]:
    """Return the names that the hook defines for these answers, without its verdict on them."""
    context = derive(**answers)
    source = (TEMPLATE / "hooks" / "pre_gen_project.py").read_text()
    names: dict[str, Any] = {"__name__": "hook"}
    exec(create_env_with_context(context).from_string(source).render(**context), names)
    return names


def answers_of(command: str) -> dict[str, str]:
    """Return the answers in a command that the hook printed."""
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
    error, command, *log = rejected.stderr.splitlines()
    assert error.startswith("error: ")
    assert not any(line.startswith("error: ") for line in log)  # What follows is cookiecutter's report on its hook.
    assert not (folder / "out").exists() or not list((folder / "out").iterdir())
    words = [str(COOKIECUTTER), *shlex.split(command)[1:]]
    result = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return only_project(folder)


def only_project(folder: Path) -> Path:
    """Return the only thing that was rendered into ``folder``/out."""
    (project,) = (folder / "out").iterdir()
    assert [path.name for path in folder.iterdir()] == ["out"]
    return project


def check_project(project: Path, name: str, author: str, slug: str) -> None:
    """Check that the files of a project parse, and hold exactly these answers."""
    assert project.name == slug
    assert (project / "src" / slug.replace("-", "_") / "train.py").exists()
    assert (project / "README.md").read_text().splitlines()[0] == f"# {name}"
    copyright_lines = [line for line in (project / "LICENSE").read_text().splitlines() if "Copyright (c)" in line]
    assert copyright_lines[0].split(" ", 3)[3] == author
    settings = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    assert (settings["name"], settings["description"]) == (slug, name)
    assert settings["authors"] == [{"name": author}]
    if (project / ".devcontainer.json").exists():
        assert json.loads((project / ".devcontainer.json").read_text())["name"] == name
    for path in project.rglob("*.y*ml"):
        assert all(isinstance(document, dict) for document in yaml.safe_load_all(path.read_text()))
