"""Applies the recipes of a rendered project's ``docs/`` as a reader would: a sentence says what to do with each block.

    Replace `configs/default.yaml` with:             the whole file
    Create `src/my_experiment/reach.py`:             a new file
    In `src/my_experiment/model.py`, replace `X`:    a function, a class or a constant, by name
    In `src/my_experiment/optim.py`, add:            at the end of the file
    In `src/my_experiment/evaluate.py`, replace:     some lines, by those in the block after "with:"
    Delete `tests/test_dataset.py`                   if the project has it

Imports at the top of a block join those of the file; ``ruff`` sorts and formats them, as ``make lint`` does.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

BLOCK = r"\n\n```\w+\n(?P<code>.*?)```\n"
SENTENCE = re.compile(
    r"^(?:Replace `(?P<file>[^`]+)` with"
    r"|Create `(?P<new_file>[^`]+)`"
    r"|In `(?P<named_in>[^`]+)`, replace `(?P<name>[^`]+)`"
    r"|In `(?P<added_to>[^`]+)`, add"
    r"|In `(?P<lines_in>[^`]+)`, replace):" + BLOCK + r"(?:\nwith:\n\n```\w+\n(?P<new>.*?)```\n)?",
    re.MULTILINE | re.DOTALL,
)


@dataclass
class Edit:
    """One edit of a recipe: the file, relative to the project, and its content before and after."""

    path: str
    before: str
    after: str


def apply(recipe: Path, project: Path) -> list[Edit]:
    """Apply the recipe to the project, and return its edits; a sentence that does not fit the project fails."""
    text = recipe.read_text()
    blocks = len(re.findall(r"^```(?:python|yaml|toml|text)$", text, re.MULTILINE))
    edits = []
    for found in SENTENCE.finditer(text):
        path = next(filter(None, found.group("file", "new_file", "named_in", "added_to", "lines_in")))
        file, code = project / path, found["code"]
        before = file.read_text() if file.exists() else ""
        assert not (found["new_file"] and before), f"{recipe.name}: {path} exists"
        if found["file"] or found["new_file"]:
            after = code
        elif found["named_in"]:
            after = replace_name(before, found["name"], code)
        elif found["added_to"]:
            after = add(before, code)
        else:
            assert before.count(code) == 1, f"{recipe.name}: {before.count(code)} times in {path}:\n{code}"
            after = before.replace(code, found["new"])
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(after)
        edits.append(Edit(path, before, after))
        blocks -= 2 if found["lines_in"] else 1
    assert edits and blocks == 0, f"{recipe.name}: {blocks} blocks belong to no sentence"
    for path in re.findall(r"^Delete `([^`]+)`", text, re.MULTILINE):
        (project / path).unlink(missing_ok=True)
    # Imports that an edit no longer needs are removed, and new ones are sorted, as `make lint` does.
    for words in (["check", "--fix", "--select", "I,F401"], ["format"]):
        subprocess.run([sys.executable, "-m", "ruff", *words, "-q", "."], cwd=project, check=True)
    return edits


def replace_name(source: str, name: str, code: str) -> str:
    """Replace a top-level function, class or assignment."""
    lines = source.splitlines(keepends=True)
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        assigned = [n.id for target in targets if target for n in ast.walk(target) if isinstance(n, ast.Name)]
        if name in [getattr(node, "name", None), *assigned]:
            first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
            imports, rest = split_imports(code)
            return insert_imports("".join([*lines[: first - 1], rest, *lines[node.end_lineno :]]), imports)
    raise AssertionError(f"no {name} at the top level")


def add(source: str, code: str) -> str:
    """Append code to a file."""
    imports, rest = split_imports(code)
    return insert_imports(f"{source.rstrip()}\n\n\n{rest}" if rest else source, imports)


def split_imports(code: str) -> tuple[str, str]:
    """Return the imports at the top of a block, and the rest."""
    nodes = ast.parse(code).body
    after = next((node for node in nodes if not isinstance(node, ast.Import | ast.ImportFrom)), None)
    if after is nodes[0]:
        return "", code
    lines = code.splitlines(keepends=True)
    end = nodes[nodes.index(after) - 1 if after else -1].end_lineno or 0
    return "".join(lines[:end]), "".join(lines[end:]).lstrip("\n")


def insert_imports(source: str, imports: str) -> str:
    """Insert imports after those of a file."""
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
    lines = source.splitlines(keepends=True)
    return "".join([*lines[: nodes[-1].end_lineno], imports, *lines[nodes[-1].end_lineno :]]) if imports else source
