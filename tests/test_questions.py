"""The questions are an interface: replay files, cruft files and scripts depend on their order and values."""

from __future__ import annotations

import tomllib

from conftest import CHOICES, CONTEXT, QUESTIONS, TEMPLATE

ORDER = "project_name project_slug author parallelism task launcher cluster tracker docker license".split()
DEFAULTS = {
    "project_name": "My Experiment",
    "author": "Your Name",
    "parallelism": "ddp",
    "task": "digits",
    "launcher": "torchrun",
    "cluster": "none",
    "tracker": "none",
    "docker": False,
    "license": "MIT",
}


def test_questions_keep_their_order_and_defaults() -> None:
    assert QUESTIONS == ORDER
    for name, default in DEFAULTS.items():
        first = CONTEXT[name][0] if isinstance(CONTEXT[name], list) else CONTEXT[name]
        assert first == default and type(first) is type(default)


def test_every_question_and_choice_has_a_label() -> None:
    labels = CONTEXT["__prompts__"]
    assert list(labels) == QUESTIONS
    for name, values in CHOICES.items():
        if values != [False, True]:
            assert list(labels[name]) == ["__prompt__", *values]


def test_the_version_is_the_same_in_all_files() -> None:
    project = tomllib.loads((TEMPLATE / "pyproject.toml").read_text())["project"]
    assert CONTEXT["_version"] == project["version"]
    assert f"## {project['version']}" in (TEMPLATE / "CHANGELOG.md").read_text()


def test_template_paths_are_valid_on_windows() -> None:
    for folder in ("{{cookiecutter.project_slug}}", "templates", "hooks"):
        for path in (TEMPLATE / folder).rglob("*"):
            assert not set('<>:"|?*\\') & set(str(path.relative_to(TEMPLATE)))
