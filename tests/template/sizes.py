"""The sizes and densities of rendered projects, which caps.json bounds; ``make sizes`` prints them.

The caps of sizes have three columns: the default project; any strategy and task, with the defaults for the others; and
everything on: a cluster, a tracker, spawn and Docker in addition. Those of densities (``density.py``) hold for all.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from density import count, densities
from jinja2 import TemplateError
from renders import File, Recorder, combinations, refusal

CAPS: dict[str, dict[str, float]] = json.loads(Path(__file__).with_name("caps.json").read_text())
# Interfaces that no underscore marks as private.
UNMARKED = r"\bLocalElasticAgent\b|\bsys\.excepthook ="
# Documented, or the name of an operator.
PUBLIC = r"os\._exit|aten\..*"


class Size(NamedTuple):
    """The size of one file of Python."""

    lines: int
    tokens: int
    longest_function: int
    settings: int
    private: frozenset[str]


@functools.cache
def size_of(file: File) -> Size:
    tree = ast.parse(file.text)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    longest = max([node.end_lineno - node.lineno + 1 for node in functions], default=0)
    tokens = count(file.text).numbers["tokens"]
    return Size(
        len(file.text.splitlines()), tokens, longest, len(settings(file)), frozenset(private_names(tree, file.text))
    )


def measure(files: list[File]) -> dict[str, float]:
    """Return the sizes and the densities of one project."""
    code = {file.path: size_of(file) for file in files if file.path.endswith(".py")}
    source = [size for path, size in code.items() if path.startswith("src/")]
    interfaces = [code[path].private for path in code if path.startswith("src/")]
    (readme,) = [file.text for file in files if file.path == "README.md"]
    sizes = {
        "tokens of src": sum(size.tokens for size in source),
        "lines of src": sum(size.lines for size in source),
        "files of src": len(source),
        "longest file": max(size.lines for size in code.values()),
        "longest function": max(size.longest_function for size in code.values()),
        "words of the README": len(readme.split()),
        "lines of tests": sum(size.lines for path, size in code.items() if path.startswith("tests/")),
        "settings": sum(size.settings for size in source),
        "private interfaces": len(frozenset().union(*interfaces)),
    }
    return sizes | densities(file.text for file in files if re.fullmatch(r"src/.*\.py", file.path))


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


def measure_all() -> dict[str, dict[str, dict[str, float]]]:
    """Return the figures of all projects that a column of caps.json is about, by column and answers."""
    recorder, found = Recorder(), dict[str, dict[str, dict[str, float]]](default={}, any={}, everything={})
    for answers in combinations():
        strategy, task, *others, license_ = answers.values()
        names = [strategy, task, *(str(other) for other in others)]
        is_plain, is_full = others == ["torchrun", "none", "none", False], is_everything(answers)
        if license_ == "MIT" and (is_plain or is_full) and refusal(answers) is None:
            try:
                figures = measure(list(recorder.render(answers)))
            except TemplateError:
                continue  # test_render.py reports it.
            found["any" if is_plain else "everything"][" ".join(names)] = figures
            if is_plain and (strategy, task) == ("ddp", "digits"):
                found["default"][" ".join(names)] = figures
    found["at most"] = found["at least"] = found["any"] | found["everything"]
    return found


def is_everything(answers: dict[str, Any]) -> bool:
    """Return whether a cluster, a tracker, spawn and Docker are chosen."""
    return answers["launcher"] == "spawn" and answers["docker"] and "none" not in answers.values()


def worst(projects: dict[str, dict[str, float]], column: str, name: str) -> tuple[float, str]:
    """Return the figure of the project that is nearest to its cap, or the most beyond it, and its answers."""
    figures = [(figures[name], answers) for answers, figures in projects.items()]
    return min(figures) if column == "at least" else max(figures)


def keeps(column: str, name: str, figure: float) -> bool:
    """Return whether a figure keeps its cap."""
    cap = CAPS[column][name]
    return figure >= cap if column == "at least" else figure <= cap


def show() -> None:
    """Print the figure of each cap's worst project, the cap, and the answers; mark what is beyond its cap."""
    measured = measure_all()
    for column, caps in CAPS.items():
        for name, cap in caps.items():
            figure, answers = worst(measured[column], column, name)
            mark = " " if keeps(column, name, figure) else "!"
            print(f"{mark} {column:10}  {name:40} {round(figure, 1):8g} of {cap:5g}  {answers}")


if __name__ == "__main__":
    show()
