"""The questions as a user sees them: asked on a terminal, in order, with their labels."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pexpect
from asking import COOKIECUTTER, edit_replay, recorded
from conftest import CHOICES, CONTEXT, QUESTIONS, TEMPLATE

PROMPT = r"\)(?:\x1b\[[\d;]*m)*: "  # The end of the default, which is in parentheses and colored.


def answer_questions(folder: Path, **answers: str) -> pexpect.spawn:
    """Answer each question on a terminal of 80 columns, by default with Enter, and return the finished process."""
    terminal = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    child = pexpect.spawn(COOKIECUTTER, [str(TEMPLATE)], cwd=str(folder), env=terminal, encoding="utf-8", timeout=60)
    for name in QUESTIONS:
        label = CONTEXT["__prompts__"][name]
        child.expect_exact(label if isinstance(label, str) else label["__prompt__"])
        child.expect(PROMPT)
        for choice in () if isinstance(label, str) else [label[choice] for choice in CHOICES[name]]:
            assert f" - {choice}\r\n" in re.sub(r"\x1b\[[\d;]*m", "", child.before)  # On one line.
        child.sendline(answers.get(name, ""))
    child.expect(pexpect.EOF)
    child.close()
    return child


def number(license_: str) -> str:
    """Return the number under which a license is offered."""
    return str(CHOICES["license"].index(license_) + 1)


def test_pressing_enter_at_every_question_renders_the_default_project(tmp_path: Path) -> None:
    child = answer_questions(tmp_path)
    assert child.exitstatus == 0 and "make setup" in child.before
    assert (tmp_path / "my-experiment" / "src" / "my_experiment" / "parallel.py").exists()


def test_choices_can_be_selected_by_number_and_the_slug_follows_the_name(tmp_path: Path) -> None:
    answer_questions(tmp_path, project_name="2024 Run", launcher="2", docker="y", license=number("Proprietary"))
    choices = recorded(tmp_path / "experiment-2024-run")
    assert (choices["launcher"], choices["docker"], choices["license"]) == ("spawn", "true", "Proprietary")


def test_a_question_that_a_replay_lacks_is_asked(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    record = edit_replay(folder, {}, without=["project_slug", "launcher"])
    words = [str(TEMPLATE), "--replay-file", str(record)]
    child = pexpect.spawn(COOKIECUTTER, words, cwd=str(folder), encoding="utf-8", timeout=60)
    for name, answer in (("project_slug", "mine"), ("launcher", "2")):
        label = CONTEXT["__prompts__"][name]
        child.expect_exact(label if isinstance(label, str) else label["__prompt__"])
        child.expect(PROMPT)
        child.sendline(answer)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0 and recorded(folder / "mine")["launcher"] == "spawn"


def test_a_rejected_answer_gets_one_line_and_a_command_with_all_the_others(tmp_path: Path) -> None:
    child = answer_questions(tmp_path, project_name="{{ 1 }}", project_slug="torch", license=number("none"))
    assert child.exitstatus == 1
    error, command = child.before.strip().split("\r\n")[-2:]
    assert error.startswith("error: project_slug is 'torch', which is the name of an existing module")
    assert "'project_name={{ 1 }}' project_slug=my-torch" in command and "license=none" in command
    assert "Traceback" not in child.before and not list(tmp_path.iterdir())
