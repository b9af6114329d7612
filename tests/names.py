"""What a name in a document may refer to: files, settings, definitions and texts of a project."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache, cached_property
from pathlib import Path

from documents import fences
from recipes import SENTENCE

SETTING = re.compile(r"(?:--)?(?P<section>[a-z_]+)\.(?P<key>[a-z_]+)(?:(?: |: ).+)?")
CALL = re.compile(r"(?P<name>\w+)\((?P<arguments>[\w, ]*)\)")
FILE = re.compile(r"[\w./*<>{}-]+(/|\.(py|md|sh|sbatch|xml|yaml|toml|txt|jsonl?|png))")
WORD = re.compile(r"\w+")
# What git ignores, and git itself.
HIDDEN = re.compile(r"/(\.git|\.venv|demo|\.hypothesis|__pycache__|\.\w+_cache)(/|$)|\.pyc$")
# Not a source: documents and what they are rendered from, data, and the list of names that have no source.
DOCUMENT = re.compile(r"\.md$|\.npz$|/docs/|\{cookiecutter\.project_slug\}/|/test_documents\.py$")


class Names:
    """The names of one or more repositories, such as the template and a project made of it.

    Args:
        roots: The folders of the repositories.
    """

    def __init__(self, *roots: Path) -> None:
        self.roots = roots

    @cached_property
    def files(self) -> list[Path]:
        """All files and folders."""
        found = [path for root in self.roots for path in sorted(root.rglob("*"))]
        return [path for path in found if not HIDDEN.search(str(path))]

    @cached_property
    def texts(self) -> dict[Path, str]:
        """The text of each file that is no document and no data."""
        found = [path for path in self.files if path.is_file() and not DOCUMENT.search(str(path))]
        return {path: path.read_text(errors="replace") for path in found}

    @cached_property
    def text(self) -> str:
        """All of these texts."""
        return "\n".join(self.texts.values())

    @cached_property
    def words(self) -> set[str]:
        """The names in these sources; what a comment, a docstring or a message says gives a word no meaning."""
        return {word for path, text in self.texts.items() for word in names_in(path.suffix == ".py", text)}

    @cached_property
    def paths(self) -> set[str]:
        """The paths of all files and folders, from the root and from each folder on the way."""
        relative = [
            path.relative_to(root).parts for root in self.roots for path in self.files if path.is_relative_to(root)
        ]
        return {"/".join(parts[start:]) for parts in relative for start in range(len(parts))}

    @cached_property
    def trees(self) -> list[ast.Module]:
        """The syntax trees of the package."""
        return [parse(text) for path, text in self.texts.items() if "src" in path.parts and path.suffix == ".py"]

    def unknown(self, names: set[str], page: str) -> list[str]:
        """Return those names that have no meaning in a document; a recipe adds what it defines."""
        edits = "\n".join(match[0] for match in SENTENCE.finditer(page))
        added = [code for code in fences(edits, "python") if not code.startswith(" ")]
        trees = [*self.trees, *map(parse, added)]
        return sorted(name for name in names if not self.has_meaning(name, trees, edits))

    def has_meaning(self, name: str, trees: list[ast.Module], edits: str) -> bool:
        """Return whether something has this name: a path, a setting, a definition, or else a text in the sources."""
        if FILE.fullmatch(name) or self.has_path(name):
            return self.has_path(name) or any(f"{verb} `{name}`" in edits for verb in ("Replace", "Create"))
        setting, call = SETTING.fullmatch(name), CALL.fullmatch(name)
        if setting and setting["section"] in fields(trees, "Config"):
            return setting["key"] in settings(trees, setting["section"])
        owner, _, attribute = name.partition(".")
        if attribute and fields(trees, owner):
            return attribute in fields(trees, owner)
        if call and (found := list(signatures(trees, call["name"]))):
            given = re.findall(r"\w+", call["arguments"])
            return any(needed <= len(given) and given == arguments[: len(given)] for arguments, needed in found)
        if WORD.fullmatch(name):
            return name in self.words or name in WORD.findall(edits)
        # Not within a longer word.
        start, end = (r"(?<!\w)" if name[0].isalnum() else ""), (r"(?!\w)" if name[-1].isalnum() else "")
        pattern = start + re.escape(name) + end
        return any(name in text and re.search(pattern, text) for text in (edits, self.text))

    def has_path(self, name: str) -> bool:
        """Return whether a file or folder has this name, from the root or from a folder; ``<x>`` stands for any."""
        pattern = re.sub(r"<\w+>", "*", name).rstrip("/")
        module = f"{pattern.replace('.', '/')}.py"
        return not self.paths.isdisjoint((pattern, module)) or (
            "*" in pattern and any(fnmatch(path, pattern) for path in self.paths)
        )


@cache
def parse(source: str) -> ast.Module:
    """Parse a source, once for all projects that have it."""
    return ast.parse(source)


@cache
def names_in(python: bool, source: str) -> set[str]:
    """Return the names in a source: in Python, those of the syntax tree, and strings of one word, such as a choice."""
    if not python:
        return set(WORD.findall(re.sub(r"(?<!\S)#.*", "", source)))
    values = [value for node in ast.walk(parse(source)) for _, value in ast.iter_fields(node)]
    words = [word for value in values for word in (value if isinstance(value, list) else [value])]
    return {part for word in words if isinstance(word, str) for part in word.split(".") if WORD.fullmatch(part)}


def classes(trees: list[ast.Module], name: str) -> Iterator[ast.ClassDef]:
    """Yield the classes of this name; a recipe may replace one."""
    yield from (node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def fields(trees: list[ast.Module], name: str) -> dict[str, str]:
    """Return the fields and methods of a class with the source of a field's type; empty if there is no such class."""
    found = {}
    for node in [statement for one in classes(trees, name) for statement in one.body]:
        if isinstance(node, ast.AnnAssign):
            found[ast.unparse(node.target)] = ast.unparse(node.annotation)
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = ""
    return found


def settings(trees: list[ast.Module], section: str) -> dict[str, str]:
    """Return the fields of a section of the settings."""
    return {name: kind for name, kind in fields(trees, fields(trees, "Config")[section]).items() if kind}


def signatures(trees: list[ast.Module], name: str) -> Iterator[tuple[list[str], int]]:
    """Yield the arguments of each function or method of this name, and how many of them have no default."""
    for node in (node for tree in trees for node in functions(tree) if node.name == name):
        arguments = [argument.arg for argument in node.args.args if argument.arg != "self"]
        yield arguments, len(arguments) - len(node.args.defaults)


@cache
def functions(tree: ast.Module) -> list[ast.FunctionDef]:
    """Return all functions and methods of a module."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
