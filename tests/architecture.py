"""The structure of a rendered package, read from its source: files, rooms, and the imports between them.

python tests/architecture.py PROJECT    prints lines and files of each room, and the arrows between rooms
"""

import ast
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

# From the bottom up: each may import what stands before it, and the files on top may import all.
ROOMS = ["config", "launch", "runtime", "splitting", "checkpoint", "reporting", "doctor", "benchmark", "plan"]
TOP = "top"


@dataclass(frozen=True)
class Import:
    """A name that one file of the package imports from another: ``from ..runtime import on_main``.

    Attributes:
        importer: The importing file, relative to the package, without suffix: ``checkpoint/loading``.
        target: The module it names, in the same form: ``runtime``; the package itself is an empty string.
        name: The imported name: ``on_main``.
    """

    importer: str
    target: str
    name: str


class Package:
    """The files of a rendered package by name (``train``, ``launch/parent``, ``launch/__init__``), parsed."""

    def __init__(self, project: Path) -> None:
        self.root = next((project / "src").iterdir())
        paths = sorted(self.root.rglob("*.py"))
        self.lines = {self.name(path): len(path.read_text().splitlines()) for path in paths}
        self.trees = {self.name(path): ast.parse(path.read_text()) for path in paths}

    def name(self, path: Path) -> str:
        return path.relative_to(self.root).with_suffix("").as_posix()

    def rooms(self) -> list[str]:
        return sorted({name.split("/")[0] for name in self.trees if "/" in name})

    def imports(self, importer: str) -> list[Import]:
        """Every import of the package's own modules, wherever it is in the file."""
        folder, found = importer.split("/")[:-1], []
        for node in ast.walk(self.trees[importer]):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = folder[: len(folder) - node.level + 1]
                target = "/".join([*base, *(node.module or "").split(".")]).strip("/")
                found += [Import(importer, target, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom | ast.Import):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                assert not any((name or "").split(".")[0] == self.root.name for name in names), "relative imports only"
        return found

    def offers(self, room: str) -> set[str]:
        """The names that a room's ``__init__`` imports from its own files."""
        return {each.name for each in self.imports(f"{room}/__init__") if each.target.startswith(room)}

    def dependencies(self, importer: str) -> set[str]:
        """The files that a file imports; of a room, its ``__init__``."""
        files = set()
        for each in self.imports(importer):
            joined = f"{each.target}/{each.name}".strip("/")
            for candidate in (joined, f"{joined}/__init__", each.target, f"{each.target}/__init__".strip("/")):
                if candidate in self.trees:
                    files.add(candidate)
                    break
        return files


def room_of(name: str) -> str:
    """The room of a file; ``config`` is the one file that all rooms may import, and everything else is on top."""
    first = name.split("/")[0]
    return first if first in ROOMS and (first == "config" or "/" in name) else TOP


def arrows(package: Package) -> Counter[tuple[str, str]]:
    """How many imports go from one room to another."""
    pairs = [
        (room_of(importer), room_of(file)) for importer in package.trees for file in package.dependencies(importer)
    ]
    return Counter(pair for pair in pairs if pair[0] != pair[1])


def upward(package: Package) -> list[str]:
    """Imports that go from a room to a higher one, or to the files on top."""
    order = [*ROOMS, TOP]
    found = []
    for importer in package.trees:
        for file in package.dependencies(importer):
            if order.index(room_of(file)) > order.index(room_of(importer)):
                found.append(f"{importer} imports {file}")
    return found


def inside(package: Package) -> list[str]:
    """Imports from a room, other than the importer's own, of what its ``__init__`` does not offer."""
    found = []
    for importer in package.trees:
        for each in package.imports(importer):
            room = each.target.split("/")[0]
            if room in package.rooms() and room != room_of(importer):
                if each.target != room or each.name not in package.offers(room):
                    found.append(f"{importer} imports {each.name} from {each.target}")
    return found


def circles(package: Package) -> list[str]:
    """Files that import each other in a circle."""
    finished: set[str] = set()
    found: list[str] = []

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            found.append(" -> ".join([*path[path.index(name) :], name]))
        elif name not in finished:
            for file in sorted(package.dependencies(name)):
                visit(file, [*path, name])
            finished.add(name)

    for name in package.trees:
        visit(name, [])
    return found


def functions(package: Package) -> dict[str, int]:
    """The length of each function, in lines."""
    return {
        f"{name}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for name, tree in package.trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }


def sizes(package: Package) -> dict[str, list[int]]:
    """The lines of each file on top, where the settings are too, and in each room."""
    folders = {TOP: [lines for name, lines in package.lines.items() if "/" not in name]}
    for room in package.rooms():
        folders[room] = [lines for name, lines in package.lines.items() if name.startswith(f"{room}/")]
    return folders


def print_figures(package: Package) -> None:
    """Print files and lines of each room, and the arrows between rooms."""
    for folder, lines in [*sizes(package).items(), ("all", list(package.lines.values()))]:
        print(f"{folder:<12}{len(lines):>3} files {sum(lines):>5} lines")
    for (importer, target), count in sorted(arrows(package).items()):
        print(f"{importer} -> {target}: {count}")
    print("upward:", upward(package) or "none")


if __name__ == "__main__":
    print_figures(Package(Path(sys.argv[1])))
