"""Reads Markdown as its readers do: which commands it shows, which names it uses in the text, what is in its tables.

tests/prose.py checks its links.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conftest import CHOICES

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")
SUBCOMMANDS = ("train", "evaluate", "generate", "doctor", "benchmark", "plan", "convert")


def covering_answers() -> Iterator[dict[str, Any]]:
    """Yield every strategy, task and cluster together; the other answers are drawn, the same ones each time.

    Documents do not depend on the license.
    """
    draw = random.Random(0)
    questions = ("parallelism", "task", "cluster")
    for values in itertools.product(*(CHOICES[name] for name in questions)):
        others = {name: draw.choice(CHOICES[name]) for name in CHOICES if name not in (*questions, "license")}
        others["license"] = CHOICES["license"][0]
        yield others | dict(zip(questions, values, strict=True))


def documents(project: Path) -> dict[str, str]:
    """Return the text of a project's documents, or of the template's own, by name."""
    paths = [project / "README.md", project / "CONTRIBUTING.md", *sorted(project.glob("docs/*.md"))]
    return {str(path.relative_to(project)): path.read_text() for path in paths if path.exists()}


def fences(text: str, *languages: str) -> list[str]:
    """Return the content of the code blocks in these languages, without the indentation of a list."""
    return [
        re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)
        for indent, language, code in FENCE.findall(text)
        if language in languages
    ]


def prose(text: str) -> str:
    """Return the text without its code blocks."""
    return FENCE.sub("", text)


def spans(text: str) -> list[str]:
    """Return the inline code outside of code blocks; a line break in it is a blank."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(text))]


def sections(text: str) -> list[str]:
    """Return the parts of a document between headings of any level."""
    hidden = FENCE.sub(lambda fence: fence[0].replace("\n#", "\n\0"), text)  # A comment in code is no heading.
    return [part.replace("\0", "#") for part in HEADING.split(hidden)[::2]]


def tables(text: str) -> list[list[list[str]]]:
    """Return the cells of each table by row, without the row of dashes."""
    found = []
    for block in re.findall(r"(?:^ *\|.*\|\n)+", f"{prose(text)}\n", re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip(" |").split(" | ")] for line in block.splitlines()]
        found.append([row for row in rows if not set("".join(row)) <= {"-", " ", "|"}])
    return found


def shell_lines(block: str) -> list[str]:
    """Return the commands of a shell block: continued lines are joined, and a here-document belongs to its command."""
    pattern = r"""^.*<<'(\w+)'\n(?:.*\n)*?\1$|^(?:.*\\\n)*.+$"""
    lines = [match[0] for match in re.finditer(pattern, block, re.MULTILINE)]
    return [line if "<<" in line else re.sub(r" +# .*", "", re.sub(r"\\\n *", "", line)).strip() for line in lines]


def console_lines(block: str) -> list[str]:
    """Return what a user typed, and the indented commands that the program suggests in its output."""
    return [re.sub(r" {2,}# .*", "", line) for line in re.findall(r"^(?:\$|  ) *(\S.*)$", block, re.MULTILINE)]


def program_of(command: str) -> str:
    """Return the name of the program that a command starts: the module's for ``python -m``, a script's own.

    A subcommand of the project's program stands for its launcher.
    """
    words = [word for word in command.splitlines()[0].split() if not ASSIGNMENT.fullmatch(word)]
    first, second, *_ = (*words, "", "")
    name = Path(first.strip('"}')).name
    if name == "python" and second == "-m":
        return words[2]
    if name == "python" and second.endswith(".py"):
        return Path(second).name
    return "launch.sh" if first in SUBCOMMANDS else name


def commands(text: str, programs: set[str]) -> list[str]:
    """Return the commands of a document in their order: code blocks of a shell, and inline code that starts a program.

    The name of a program alone is no command.
    """
    found: list[str] = []
    for match in re.finditer(f"{FENCE.pattern}|`([^`]+)`", text, FENCE.flags):
        _, language, _, code = match.groups()
        if code is None:
            (block,) = fences(match[0], language)
            found += shell_lines(block) if language == "bash" else console_lines(block) if language == "console" else []
        elif is_command(span := " ".join(code.split()), programs):
            found.append(span)
    return found


def is_command(span: str, programs: set[str]) -> bool:
    """Return whether inline code is a command of one of these programs; a subcommand has options after it."""
    words = [word for word in span.split() if not ASSIGNMENT.fullmatch(word)]
    if len(words) < 2 or (words[0] in SUBCOMMANDS and not words[1].startswith("--")):
        return False
    return program_of(span) in programs
