"""Unusual answers: rejected with a reason and a command that works, or rendered correctly."""

from __future__ import annotations

import json
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import TEMPLATE, Bake, run

BIN = Path(sys.executable).parent

REJECTED = [
    ("project_slug", "torch", "existing module"),
    ("project_slug", "test", "existing module"),
    ("project_slug", "json", "existing module"),
    ("project_slug", "Torch", "existing module"),
    ("project_slug", "class", "keyword"),
    ("project_slug", "match", "keyword"),
    ("project_slug", "3d-vision", "letters and digits"),
    ("project_slug", "my experiment", "letters and digits"),
    ("project_slug", "my.experiment", "letters and digits"),
    ("project_slug", "-x", "letters and digits"),
    ("project_slug", "a/b", "letters and digits"),
    ("project_slug", "$(reboot)", "letters and digits"),
    ("project_slug", "", "empty"),
    ("project_name", "", "empty"),
    ("project_name", "   ", "empty"),
    ("project_name", "two\nlines", "control character"),
    ("project_name", "bell\a", "control character"),
    ("author", "", "empty"),
    ("author", "A\x1b[31m", "control character"),
]


@pytest.mark.parametrize("answers", [{"paralelism": "ddp"}, {"tracker": "tensorbored"}, {"docker": "false"}])
def test_the_fixture_rejects_unknown_questions_and_choices(bake: Bake, answers: dict[str, str]) -> None:
    with pytest.raises(AssertionError):
        bake(**answers)


@pytest.mark.parametrize(("question", "answer", "reason"), REJECTED)
def test_an_answer_that_cannot_work_is_rejected_with_a_command_that_works(
    question: str, answer: str, reason: str, tmp_path: Path
) -> None:
    words = [BIN / "cookiecutter", TEMPLATE, "--no-input", "--output-dir", "out", "launcher=spawn"]
    result = run(*words, f"{question}={answer}", cwd=tmp_path, expect=1)
    message, retry = result.stderr.splitlines()[:2] if "error:" in result.stderr.splitlines()[0] else ("", "")
    assert message.startswith(f"error: {question} is {answer!r}, which ")
    assert reason in message
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]

    # The printed command works: it renders the project, and keeps the other answers.
    command = shlex.split(retry)
    assert command[0] == "cookiecutter"
    run(BIN / "cookiecutter", *command[1:], cwd=tmp_path)
    settings = [tomllib.loads(path.read_text()) for path in tmp_path.glob("out/**/pyproject.toml")]
    assert [table["tool"]["ddp-template"]["launcher"] for table in settings] == ["spawn"]


@pytest.mark.parametrize("question", ["parallelism", "launcher", "docker"])
def test_an_unknown_choice_is_rejected(question: str, tmp_path: Path) -> None:
    result = run(BIN / "cookiecutter", TEMPLATE, "--no-input", f"{question}=nothing", cwd=tmp_path, expect=1)
    assert "nothing provided for" in result.stderr and question in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name",
    [
        'The "best" one',
        "It's mine",
        r"back\slash \n \x41",
        "$(touch hacked) `touch hacked` ; rm -rf *",
        "<b>&amp;</b> %s {} 100%",
        "Ünïcödé 東京 🔥",
        '"""',
        "---",
        "x" * 90,
    ],
)
def test_a_name_may_contain_any_printable_character(bake: Bake, name: str) -> None:
    project = bake(project_name=name, author=name, project_slug="plain", docker=True)
    assert (project / "README.md").read_text().splitlines()[0] == f"# {name}"
    assert f"{name}\n" in (project / "LICENSE").read_text()
    settings = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    assert settings["description"] == name and settings["authors"] == [{"name": name}]
    assert json.loads((project / ".devcontainer.json").read_text())["name"] == name
    result = run(sys.executable, "-m", "plain", "--help", cwd=project, PYTHONPATH="src")
    assert "train" in result.stdout
    run(BIN / "ruff", "check", "--no-cache", "src", cwd=project)
    assert not (project / "hacked").exists()


@pytest.mark.parametrize(
    ("name", "slug"), [("My Experiment", "my-experiment"), ("  Über  Netz 2!", "uber-netz-2"), ("東京", "dong-jing")]
)
def test_the_default_slug_is_derived_from_the_name(bake: Bake, name: str, slug: str) -> None:
    project = bake(project_name=name)
    assert project.name == slug
    assert (project / "src" / slug.replace("-", "_") / "train.py").exists()


@pytest.mark.parametrize("slug", ["a", "my_experiment", "a-very-long-name-for-an-experiment-with-many-words-in-it-2"])
def test_the_code_passes_ruff_with_any_slug(bake: Bake, slug: str) -> None:
    project = bake(project_slug=slug, launcher="spawn", tracker="tensorboard")
    run(BIN / "ruff", "format", "--check", "--no-cache", ".", cwd=project)
    run(BIN / "ruff", "check", "--no-cache", ".", cwd=project)
