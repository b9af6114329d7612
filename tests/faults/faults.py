"""Reads the faults of faults.txt, and plants them in the template's source."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from conftest import TEMPLATE

FOLDERS = [TEMPLATE / "{{cookiecutter.project_slug}}", TEMPLATE / "templates"]
FILES = [TEMPLATE / "check_answers.py", *(path for folder in FOLDERS for path in folder.rglob("*") if path.is_file())]


@dataclass(frozen=True)
class Fault:
    """In one definition of a file, or in the whole file, one expression is replaced by another."""

    file: str
    where: str
    old: str
    new: str
    test: str
    answers: dict[str, str]
    is_planted_often: bool


def read_faults() -> dict[str, Fault]:
    """Return the faults by their sentences."""
    faults, test, choices = dict[str, Fault](), "", dict[str, str]()
    text = re.sub("^#.*\n", "", Path(__file__).with_suffix(".txt").read_text(), flags=re.MULTILINE)
    for line in re.sub(r"\n {8}->", " ->", text).splitlines():
        if line.startswith(("tests/", "project/")):
            test, choices = line, {}
        elif line.startswith("with "):
            choices = dict(word.split("=") for word in line.split()[1:])
        elif line.startswith(("- ", "* ")):
            mark, name = line.split(" ", 1)
        elif line:
            place, change = line.strip().split(": ", 1)
            (file, *where), (old, new) = place.split(), change.split(" ->")
            path = find_file(file)
            assert name not in faults, name
            faults[name] = Fault(path, *(where or [""]), old, new.strip(), test, of_folder(path) | choices, mark == "*")
    return faults


def find_file(end: str) -> str:
    """Return the path of a file in the template; the name of an optional one is in quotes."""
    paths = [str(path.relative_to(TEMPLATE)) for path in FILES]
    found = [path for path in paths if f"/{path}".endswith(f"/{end}") or f"{{{{ '{end}'" in path]
    assert len(found) == 1, f"{end} means {found}"
    return found[0]


def of_folder(path: str) -> dict[str, str]:
    """Return the choice in whose folder a file is."""
    top, question, choice, *_ = [*path.split("/"), "", ""]
    return {question: choice} if top == "templates" and choice != "shared" else {}


def plant(fault: Fault, text: str) -> str:
    """Return the text of the fault's file with the fault in it."""
    start, end = find_definition(text, fault.where)
    found = [*re.finditer(build_pattern(fault.old), text[start:end])]
    assert len(found) == 1, f"{fault.where or fault.file} has {len(found)} times: {fault.old}"
    parts = iter(found[0].groups())
    new = re.sub(r"\.\.\.", lambda _: next(parts), fault.new)
    return text[: start + found[0].start()] + new + text[start + found[0].end() :]


def build_pattern(old: str) -> str:
    """Return the regular expression of the texts that ``old`` stands for."""
    patterns = []
    for token in re.findall(r"\.\.\.|\w+|[^\w\s]", old):
        if token == "...":
            patterns.append(r"([\s\S]*?)")
        elif re.match(r"\w", token):
            patterns.append(rf"\b{token}\b")
        else:  # A formatter that breaks a line adds a comma before the bracket that closes.
            patterns.append((r"(?:,\s*)?" if token in ")]}" else "") + re.escape(token))
    return r"\s*".join(patterns)


def find_definition(text: str, where: str) -> tuple[int, int]:
    """Return the positions in a text at which a function or class begins and ends, with its decorators."""
    if not where:
        return 0, len(text)
    node: ast.AST = ast.parse(text)
    for name in where.split("."):
        inside = [child for child in ast.iter_child_nodes(node) if getattr(child, "name", None) == name]
        assert len(inside) == 1, f"{len(inside)} definitions of {where}"
        node = inside[0]
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = text.splitlines(keepends=True)
    return len("".join(lines[: first - 1])), len("".join(lines[: node.end_lineno]))


FAULTS = read_faults()
