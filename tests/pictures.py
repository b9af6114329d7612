"""Draws the pictures of the README from the real thing: the dialogue, and a training run, each on a terminal.

.venv/bin/python tests/pictures.py    # writes docs/dialogue.svg and docs/training.svg; a minute on two cores
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pexpect
from rich.console import Console
from rich.text import Text

TEMPLATE = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
COLUMNS = 100
# What is typed; Enter where there is no answer.
ANSWERS = {"project_name": "Night Shift", "parallelism": "2"}


def terminal(*words: str, cwd: Path, seconds: int = 600, **variables: str) -> pexpect.spawn:
    """Start a program on a terminal of the size of the pictures."""
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": "60"} | variables
    size = (60, COLUMNS)
    return pexpect.spawn(
        words[0], [*words[1:]], cwd=str(cwd), env=environment, encoding="utf-8", timeout=seconds, dimensions=size
    )


def draw(output: str, title: str, path: Path) -> None:
    """Write what a terminal showed as an SVG file."""
    lines = [line.split("\r")[-1].rstrip() for line in output.replace("\r\n", "\n").strip("\n").split("\n")]
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, color_system="truecolor", force_terminal=True)
        for line in lines:
            console.print(Text.from_ansi(line))
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{line.rstrip()}\n" for line in console.export_svg(title=title).splitlines()))


def ask(folder: Path) -> str:
    """Answer the questions in ``folder``, and return what the terminal showed."""
    from conftest import CONTEXT, QUESTIONS

    child = terminal(str(BIN / "cookiecutter"), str(TEMPLATE), cwd=folder)
    shown = "$ cookiecutter gh:org/ddp-template\n"
    for name in QUESTIONS:
        label = CONTEXT["__prompts__"][name]
        child.expect_exact(label if isinstance(label, str) else label["__prompt__"])
        shown += child.before + child.after
        child.expect(r"\)(?:\x1b\[[\d;]*m)*: ")
        shown += child.before + child.after
        child.sendline(ANSWERS.get(name, ""))
    child.expect(pexpect.EOF)
    return shown + child.before


def train(project: Path) -> str:
    """Train the project on two ranks, and return what the terminal showed."""
    child = terminal(str(project / "scripts/launch.sh"), "train", cwd=project, NPROC="2", PYTHON=sys.executable)
    child.expect(pexpect.EOF)
    return f"$ NPROC=2 scripts/launch.sh train\n{child.before}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        draw(ask(Path(folder)), "eleven questions", TEMPLATE / "docs" / "dialogue.svg")
        (project,) = Path(folder).iterdir()
        draw(train(project), "a training run on two ranks", TEMPLATE / "docs" / "training.svg")


if __name__ == "__main__":
    main()
