"""The sizes of rendered projects, which caps.json bounds; ``make sizes`` prints them."""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError
from renders import ASIDE, File, Recorder, combinations, refusal

CAPS = Path(__file__).with_name("caps.json")
# Interfaces that no underscore marks as private.
UNMARKED = r"\bLocalElasticAgent\b|\bsys\.excepthook ="
# Documented, or the name of an operator.
PUBLIC = r"os\._exit|aten\..*"


class Size(NamedTuple):
    """The size of one file; what is about code is 0 for other files."""

    lines: int
    longest_function: int = 0
    settings: int = 0
    private: frozenset[str] = frozenset()
    average_line: int = 0  # Rounded up; that of a file of a few lines is 0: it is a docstring.


@functools.cache
def size_of(file: File) -> Size:
    lines = file.content.decode().splitlines()
    if not file.path.endswith(".py"):
        return Size(len(lines))
    tree = ast.parse(file.text)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    longest = max([node.end_lineno - node.lineno + 1 for node in functions], default=0)
    average = -(-sum(map(len, lines)) // len(lines)) if len(lines) > 10 else 0
    return Size(len(lines), longest, len(settings(file)), frozenset(private_names(tree, file.text)), average)


def measure(files: list[File]) -> dict[str, int]:
    """Return the sizes of one project."""
    every = {file.path: size_of(file) for file in files if not file.path.endswith(ASIDE)}
    code = {path: size for path, size in every.items() if path.endswith(".py")}
    source = [size for path, size in code.items() if path.startswith("src/")]
    return {
        "lines of src": sum(size.lines for size in source),
        "files of src": len(source),
        "longest file": max(size.lines for size in code.values()),
        "longest function": max(size.longest_function for size in code.values()),
        "README": every["README.md"].lines,
        "tests": sum(size.lines for path, size in code.items() if path.startswith("tests/")),
        "settings": sum(size.settings for size in source),
        "all that is rendered": sum(size.lines for size in every.values()),
        "private interfaces": len(frozenset().union(*(size.private for size in source))),
        "characters in an average line of a file": max(size.average_line for size in source),
    }


def settings(file: File) -> list[str]:
    """Return the settings that a file defines: the fields of the dataclasses of config.py, but of all sections."""
    sections = [node for node in ast.parse(file.text).body if isinstance(node, ast.ClassDef) and node.name != "Config"]
    fields = [field for section in sections for field in section.body if isinstance(field, ast.AnnAssign)]
    return [ast.unparse(field.target) for field in fields] if file.path.endswith("/config.py") else []


def private_names(tree: ast.AST, text: str) -> Iterator[str]:
    """Yield the private interfaces of Python and of packages that a file uses: names with an underscore in front."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            names = [ast.unparse(node)]
        else:
            continue
        for name in names:
            found = re.match(r"(.*?(?:^|\.)_[A-Za-z]\w*)", name)  # `torch.utils._pytree.tree_map` as its module.
            if found and not re.fullmatch(PUBLIC, found[1]):
                yield found[1]
    yield from re.findall(UNMARKED, text)


def measure_all() -> dict[str, dict[str, dict[str, int]]]:
    """Return the sizes of all projects that a column of caps.json is about, by column and answers."""
    recorder, found = Recorder(), dict[str, dict[str, dict[str, int]]](default={}, any={}, everything={})
    for answers in combinations():
        strategy, task, *others, license_ = answers.values()
        names = [strategy, task, *(str(other) for other in others)]
        is_plain, is_full = others == ["torchrun", "none", "none", False], is_everything(answers)
        if license_ == "MIT" and (is_plain or is_full) and refusal(answers) is None:
            try:
                sizes = measure(list(recorder.render(answers)))
            except TemplateError:
                continue  # test_render.py reports it.
            found["any" if is_plain else "everything"][" ".join(names)] = sizes
            if is_plain and (strategy, task) == ("ddp", "digits"):
                found["default"][" ".join(names)] = sizes
    return found


def is_everything(answers: dict[str, Any]) -> bool:
    """Return whether a cluster, a tracker, spawn and Docker are chosen."""
    return answers["launcher"] == "spawn" and answers["docker"] and "none" not in answers.values()


def show() -> None:
    """Print the largest sizes, the caps, and the answers."""
    caps = json.loads(CAPS.read_text())
    for column, projects in measure_all().items():
        for name, cap in caps[column].items():
            largest, answers = max((sizes[name], answers) for answers, sizes in projects.items())
            print(f"{column:10}  {name:40} {largest:5} of {cap:4}  {answers}")


if __name__ == "__main__":
    show()
