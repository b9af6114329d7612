"""The questions are an interface: replay files, cruft files and scripts depend on their order and values."""

from __future__ import annotations

import tomllib

from conftest import CHOICES, CONTEXT, QUESTIONS, TEMPLATE

ORDER = "project_name project_slug description author parallelism task launcher cluster tracker docker license".split()
DEFAULTS = {
    "project_name": "My Experiment",
    "description": "Distributed training in plain PyTorch",
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


def test_labels_say_when_to_pick_a_choice_and_fit_80_columns() -> None:
    """cookiecutter indents a choice by up to 9 columns, and adds a number and a default to a question."""
    labels = CONTEXT["__prompts__"]
    for name, values in CHOICES.items():
        if values != [False, True]:
            assert all(labels[name][value].startswith(f"{value}: pick it ") for value in values)
    every = [text for label in labels.values() for text in ([label] if isinstance(label, str) else label.values())]
    assert not [text for text in every if len(text) > 70]
    for number, (name, label) in enumerate(labels.items(), 1):
        default = {"project_slug": "my-experiment"}.get(name, CONTEXT[name])
        if isinstance(default, str):
            assert len(f"  [{number}/{len(labels)}] {label} ({default}): ") < 80


def test_the_version_is_the_same_in_all_files() -> None:
    project = tomllib.loads((TEMPLATE / "pyproject.toml").read_text())["project"]
    assert CONTEXT["_version"] == project["version"]
    assert f"## {project['version']}" in (TEMPLATE / "CHANGELOG.md").read_text()


def test_template_paths_are_valid_on_windows() -> None:
    for folder in ("{{cookiecutter.project_slug}}", "templates", "hooks"):
        for path in (TEMPLATE / folder).rglob("*"):
            assert not set('<>:"|?*\\') & set(str(path.relative_to(TEMPLATE)))
