"""The questions as a person meets them: asked on a terminal, in order, with their labels."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

import pexpect
from conftest import CONTEXT, QUESTIONS, TEMPLATE

COOKIECUTTER = str(Path(sys.executable).with_name("cookiecutter"))
PROMPT = r"\)(?:\x1b\[[\d;]*m)*: "  # The default in parentheses, in colour on a terminal.


def start(folder: Path) -> pexpect.spawn:
    """cookiecutter on a terminal, wide enough that no label is broken."""
    terminal = os.environ | {"TERM": "xterm", "COLUMNS": "400"}
    return pexpect.spawn(COOKIECUTTER, [str(TEMPLATE)], cwd=str(folder), env=terminal, encoding="utf-8", timeout=60)


def ask(folder: Path, answers: dict[str, str]) -> pexpect.spawn:
    """Answer each question as it is asked; Enter where there is no answer."""
    child = start(folder)
    for name in QUESTIONS:
        label = CONTEXT["__prompts__"][name]
        child.expect_exact(label if isinstance(label, str) else label["__prompt__"])
        child.expect(PROMPT)
        child.sendline(answers.get(name, ""))
    child.expect(pexpect.EOF)
    child.close()
    return child


def test_enter_all_the_way_gives_the_default_project(tmp_path: Path) -> None:
    child = ask(tmp_path, {})
    assert child.exitstatus == 0
    assert "make setup" in child.before
    assert (tmp_path / "my-experiment" / "src" / "my_experiment" / "parallel.py").exists()


def test_answers_by_number(tmp_path: Path) -> None:
    ask(tmp_path, {"project_name": "Night Run", "launcher": "2", "tracker": "2", "docker": "y", "license": "4"})
    project = tmp_path / "night-run"
    told = tomllib.loads((project / "pyproject.toml").read_text())["tool"]["ddp-template"]
    assert (told["launcher"], told["tracker"], told["docker"]) == ("spawn", "tensorboard", "true")
    assert "All rights reserved" in (project / "LICENSE").read_text()


def test_a_choice_that_does_not_exist_is_asked_again(tmp_path: Path) -> None:
    child = start(tmp_path)
    for _ in range(5):
        child.expect(PROMPT)
        child.sendline("")
    child.expect_exact(CONTEXT["__prompts__"]["launcher"]["__prompt__"])
    child.expect(PROMPT)
    child.sendline("7")
    child.expect("(?i)select one of the available options")
    child.close(force=True)
    assert not list(tmp_path.iterdir())
