"""Records which branches of the templates are taken while projects are rendered.

Branches are: a template is rendered; a condition is true, or false; a loop is entered; an include whose name is
computed finds one of the files that fit, or none where that is allowed.
"""

from __future__ import annotations

import fnmatch
import json
import os
import sys
from pathlib import Path
from typing import Any

from conftest import CONTEXT, TEMPLATE
from cookiecutter.environment import StrictEnvironment
from cookiecutter.generate import is_binary, is_copy_only_path
from jinja2 import Template, nodes

TREE, PARTS = TEMPLATE / "{{cookiecutter.project_slug}}", TEMPLATE / "templates"


class Recorder(StrictEnvironment):
    """cookiecutter's Jinja environment, for many projects: it compiles a template once, and records branches."""

    def __init__(self) -> None:
        if str(TEMPLATE) not in sys.path:  # Which has check_answers.py, an extension; pytest and cookiecutter add it.
            sys.path.append(str(TEMPLATE))
        super().__init__(context={"cookiecutter": CONTEXT}, keep_trailing_newline=True, **CONTEXT["_jinja2_env_vars"])
        self.filters |= {"condition": self.condition, "included": self.included}
        self.strings: dict[str, Template] = {}
        self.files: dict[str, Template] = {}
        self.branches = {f"{path} is rendered" for path in rendered_files()}
        self.taken: set[str] = set()

    def from_string(self, source: Any, *_: Any, **__: Any) -> Template:
        if source not in self.strings:
            self.strings[source] = super().from_string(source)
        return self.strings[source]

    def get_template(self, name: Any, *_: Any, **__: Any) -> Template:
        if name not in self.files:
            self.files[name] = super().get_template(name)
            self.taken.add(f"{relative(self.files[name].filename)} is rendered")
        return self.files[name]

    def condition(self, value: Any, branch: str) -> Any:
        """Record a condition's value; a filter that ``_parse`` adds."""
        self.taken.add(f"{branch} is {bool(value)}")
        return value

    def included(self, name: str, branch: str) -> str:
        """Record the name of an included file; a filter that ``_parse`` adds."""
        self.taken.add(f"{branch} is {name if (PARTS / name).exists() else 'missing'}")
        return name

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        file, first_line = (relative(filename), 1) if filename else ("cookiecutter.json", line_of(source))
        for number, node in enumerate([*tree.find_all((nodes.If, nodes.CondExpr, nodes.For, nodes.Include))]):
            branch = f"{file}:{first_line + node.lineno - 1} ({type(node).__name__} {number})"

            def recorded(value: nodes.Expr, recorder: str, branch: str = branch) -> nodes.Filter:
                words = [nodes.Const(branch)]
                return nodes.Filter(value, recorder, words, [], None, None, lineno=value.lineno, environment=self)

            outcomes: list[object] = []
            if isinstance(node, nodes.If | nodes.CondExpr):
                node.test, outcomes = recorded(node.test, "condition"), [True, False]
            elif isinstance(node, nodes.For):
                node.iter, outcomes = recorded(node.iter, "condition"), [True]
            elif isinstance(node, nodes.Include) and not isinstance(node.template, nodes.Const):
                outcomes = [*files_that_fit(node.template), *(["missing"] if node.ignore_missing else [])]
                node.template = recorded(node.template, "included")
            self.branches |= {f"{branch} is {outcome}" for outcome in outcomes}
        return tree


def relative(filename: str | None) -> str:
    """The path of a template, from the top of this repository."""
    return str(Path(filename or "").resolve().relative_to(TEMPLATE))


def line_of(source: str) -> int:
    """The line of a value in cookiecutter.json; 0 if it is not from there."""
    lines = (TEMPLATE / "cookiecutter.json").read_text().splitlines()
    return next((number for number, line in enumerate(lines, 1) if json.dumps(source) in line), 0)


def rendered_files() -> list[str]:
    """The files that have to be rendered, instead of copied, by some combination."""
    paths = [path for folder in (TREE, PARTS) for path in folder.rglob("*") if path.is_file() and not is_binary(path)]
    context = {"cookiecutter": CONTEXT}
    return [relative(str(path)) for path in paths if not is_copy_only_path(os.path.relpath(path, TREE), context)]


def files_that_fit(name: nodes.Expr) -> list[str]:
    """The files of templates/ that the computed name of an include may mean; `shared` is no choice, but a folder."""
    words = name.nodes if isinstance(name, nodes.Concat) else [name]
    pattern = "".join(word.value if isinstance(word, nodes.Const) else "*" for word in words)
    files = [str(path.relative_to(PARTS)) for path in PARTS.rglob("*")]
    return [file for file in fnmatch.filter(files, pattern) if pattern.startswith("*") or "/shared/" not in file]
