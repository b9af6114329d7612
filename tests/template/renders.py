"""Combinations of answers, rendered in memory, each distinct file once; and the branches that were taken.

Branches are: a template is rendered; a condition is true, or false; a loop is entered; an include whose name is
computed finds one of the files that fit, or none where that is allowed.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from conftest import CHOICES, CONTEXT, TEMPLATE
from cookiecutter.environment import StrictEnvironment
from cookiecutter.generate import generate_context, is_binary, is_copy_only_path
from cookiecutter.prompt import prompt_for_config
from jinja2 import FileSystemLoader, TemplateError, nodes

import check_answers

TREE, PARTS = TEMPLATE / "{{cookiecutter.project_slug}}", TEMPLATE / "templates"
# What a project is not read for: its pins, its license and its data.
ASIDE = ("constraints.txt", "LICENSE", ".npz")


class File(NamedTuple):
    """One file of a rendered project."""

    path: str
    content: bytes
    executable: bool

    @property
    def text(self) -> str:
        """The text; of pyproject.toml, without the table of answers."""
        text = self.content.decode()
        return text.split("[tool.ddp-template]")[0] if self.path == "pyproject.toml" else text


class Project(NamedTuple):
    """A combination of answers, and the files that it renders to, by path."""

    answers: dict[str, Any]
    files: dict[str, File]

    def matching(self, pattern: str) -> list[File]:
        """Return the files whose path matches a pattern."""
        return [file for path, file in self.files.items() if fnmatch.fnmatch(path, pattern)]


class Rendering:
    """All projects, the projects of each distinct file, and the branches of the templates."""

    def __init__(self, answered: Iterable[dict[str, Any]]) -> None:
        self.recorder = Recorder()
        self.owners: dict[File, list[Project]] = {}
        self.projects: list[Project] = []
        self.failures: dict[str, str] = {}  # What does not render, by the error.
        for answers in answered:
            if refusal(answers) is None:
                self.keep(answers)

    def keep(self, answers: dict[str, Any]) -> None:
        """Render a project; files that are equal become one object."""
        try:
            files = list(self.recorder.render(answers))
        except TemplateError as error:
            self.failures.setdefault(f"{type(error).__name__}: {error}", str(answers))
            return
        project = Project(answers, {})
        self.projects.append(project)
        for file in files:
            owners = self.owners.setdefault(file, [])
            owners.append(project)
            project.files[file.path] = owners[0].files.get(file.path, file)

    def texts(self) -> list[File]:
        """Return the distinct files that hold text."""
        return [file for file in self.owners if not file.path.endswith(".npz")]


class Recorder(StrictEnvironment):
    """cookiecutter's Jinja environment, for many projects: it compiles a template once, and records branches."""

    def __init__(self) -> None:
        super().__init__(context={"cookiecutter": CONTEXT}, keep_trailing_newline=True, **CONTEXT["_jinja2_env_vars"])
        self.loader = FileSystemLoader([TREE, PARTS])
        self.filters |= {"condition": self.condition, "included": self.included}
        self.sources = sorted(path.relative_to(TREE) for path in TREE.rglob("*") if path.is_file())
        self.branches = {f"{path} is rendered" for path in template_files()}
        self.taken: set[str] = set()
        self.used: list[str] = []  # The templates of the file that was rendered last.
        self.from_string = functools.cache(self.from_string)
        self.get_template = functools.cache(self.get_template)
        self.defaults = derive()  # No other value is computed from a choice.

    def render(self, answers: dict[str, Any]) -> Iterable[File]:
        """Yield the files of a project, as cookiecutter's ``generate_files`` writes them."""
        context = {"cookiecutter": self.defaults | answers}
        for source in self.sources:
            path = self.from_string(str(source)).render(context)
            if not Path(path).name or path.endswith("/"):
                continue  # An optional file.
            self.used = [relative(str(TREE / source))]
            if is_copied(source):
                content = read_bytes(TREE / source)
            else:
                template = self.get_template(str(source))
                self.taken.add(f"{self.used[0]} is rendered")
                content = template.render(context).encode()
            yield File(path, content, os.access(TREE / source, os.X_OK))

    def condition(self, value: Any, branch: str) -> Any:
        """Record a condition's value; a filter that ``_parse`` adds."""
        self.taken.add(f"{branch} is {bool(value)}")
        return value

    def included(self, name: str, branch: str) -> str:
        """Record the name of an included file; a filter that ``_parse`` adds."""
        self.taken.add(f"{branch} is {name if (PARTS / name).exists() else 'missing'}")
        self.taken.add(f"templates/{name} is rendered")
        self.used += [f"templates/{name}"] if (PARTS / name).exists() else []
        return name

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        place = relative(filename) if filename else source
        for number, node in enumerate(tree.find_all((nodes.If, nodes.CondExpr, nodes.For, nodes.Include))):
            branch = f"{place}:{node.lineno} ({type(node).__name__} {number})"
            outcomes: list[object] = []
            if isinstance(node, nodes.If | nodes.CondExpr):
                node.test, outcomes = self.recorded(node.test, "condition", branch), [True, False]
            elif isinstance(node, nodes.For):
                node.iter, outcomes = self.recorded(node.iter, "condition", branch), [True]
            elif isinstance(node, nodes.Include):
                if not isinstance(node.template, nodes.Const):
                    outcomes = [*files_that_fit(node.template), *(["missing"] if node.ignore_missing else [])]
                node.template = self.recorded(node.template, "included", branch)
            self.branches |= {f"{branch} is {outcome}" for outcome in outcomes}
        return tree

    def recorded(self, value: nodes.Expr, recorder: str, branch: str) -> nodes.Filter:
        """Return an expression that passes through one of the filters above."""
        return nodes.Filter(
            value, recorder, [nodes.Const(branch)], [], None, None, lineno=value.lineno, environment=self
        )


def combinations() -> Iterable[dict[str, Any]]:
    """Yield every combination of answers."""
    for values in itertools.product(*CHOICES.values()):
        yield dict(zip(CHOICES, values, strict=True))


def pairs() -> list[dict[str, Any]]:
    """Return all pairs of answers, the others being the defaults; and what ``mixed`` returns."""
    default = {name: values[0] for name, values in CHOICES.items()}
    found = [
        default | dict(zip(names, values, strict=True))
        for names in itertools.combinations(CHOICES, 2)
        for values in itertools.product(*(CHOICES[name] for name in names))
    ]
    found += mixed()
    return [answers for number, answers in enumerate(found) if answers not in found[:number]]


def mixed() -> list[dict[str, Any]]:
    """Return a few combinations that have every choice, none of them a default where there are several."""
    longest = max(map(len, CHOICES.values()))
    found = [{name: values[(i + 1) % len(values)] for name, values in CHOICES.items()} for i in range(longest)]
    for answers in found:
        if fault := refusal(answers):
            answers[fault[0]] = fault[2]
    return found


def refusal(answers: dict[str, Any]) -> tuple[str, str, Any] | None:
    """Return which choice another one refuses, why, and a better one."""
    return check_answers.find_refusal(CONTEXT | answers)


def derive(**answers: Any) -> dict[str, Any]:
    """Return what cookiecutter renders a project with, given these answers and ``--no-input``."""
    return prompt_for_config(
        generate_context(str(TEMPLATE / "cookiecutter.json"), extra_context=answers), no_input=True
    )


@functools.cache
def is_copied(source: Path) -> bool:
    """Return whether a file is copied instead of rendered."""
    return is_copy_only_path(str(source), {"cookiecutter": CONTEXT}) or is_binary(str(TREE / source))


@functools.cache
def read_bytes(path: Path) -> bytes:
    return path.read_bytes()


def relative(filename: str | None) -> str:
    """Return the path of a template, from the top of this repository."""
    return str(Path(filename or "").relative_to(TEMPLATE))


def template_files() -> list[str]:
    """Return the files that have to be rendered by some combination."""
    own = [path for path in TREE.rglob("*") if path.is_file() and not is_copied(path.relative_to(TREE))]
    parts = [path for path in PARTS.rglob("*") if path.is_file() and path.name != "facts.json"]
    return [relative(str(path)) for path in own + parts]


def files_that_fit(name: nodes.Expr) -> list[str]:
    """Return the files of templates/ that the computed name of an include may mean; ``shared`` is no choice."""
    words = name.nodes if isinstance(name, nodes.Concat) else [name]
    pattern = "".join(word.value if isinstance(word, nodes.Const) else "*" for word in words)
    files = [str(path.relative_to(PARTS)) for path in PARTS.rglob("*")]
    return [file for file in fnmatch.filter(files, pattern) if pattern.startswith("*") or "/shared/" not in file]


def write(files: Iterable[File], folder: Path) -> Path:
    """Write files below a folder, and return it."""
    for file in files:
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.content)
    return folder


def alike(projects: list[Project], question: str) -> list[list[Project]]:
    """Return groups of projects that differ in the answer to one question alone."""
    groups: dict[str, list[Project]] = {}
    for project in projects:
        others = {name: value for name, value in project.answers.items() if name != question}
        groups.setdefault(str(others), []).append(project)
    return list(groups.values())


def covering(projects: list[Project], wanted: Callable[[File], bool]) -> list[Project]:
    """Return a few projects that together have every distinct file that is wanted."""
    missing = {file for project in projects for file in project.files.values() if wanted(file)}
    chosen = []
    while missing:
        chosen.append(max(projects, key=lambda project: len(missing.intersection(project.files.values()))))
        missing.difference_update(chosen[-1].files.values())
    return chosen
