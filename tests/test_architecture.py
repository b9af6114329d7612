"""The structure of the rendered package: files on top, rooms, and imports that go one way."""

import re
import subprocess
import sys

import pytest
from architecture import ROOMS, TOP, Package, circles, functions, inside, sizes, upward
from conftest import CHOICES, TEMPLATE, Bake

every_package = pytest.mark.parametrize(
    ("parallelism", "task"), [(p, task) for p in CHOICES["parallelism"] for task in CHOICES["task"]]
)


def package_of(baked: Bake, parallelism: str, task: str) -> Package:
    """The package with the most files: spawn adds one."""
    return Package(baked(parallelism=parallelism, task=task, launcher="spawn"))


@every_package
def test_imports_go_one_way(baked: Bake, parallelism: str, task: str) -> None:
    package = package_of(baked, parallelism, task)
    assert package.rooms() == sorted(ROOMS[1:])
    assert upward(package) == []
    assert inside(package) == []
    assert circles(package) == []


@pytest.mark.parametrize(
    ("file", "line", "check"),
    [
        ("runtime/files.py", "from ..train import Trainer", upward),
        ("launch/parent.py", "from ..runtime import on_main", upward),
        ("train.py", "from .runtime.files import publish", inside),
        ("train.py", "from .runtime import failures", inside),
        ("data.py", "def late():\n    from .train import Trainer", circles),
        ("runtime/failures.py", "from .process_group import Process", circles),
    ],
)
def test_a_wrong_import_is_found(bake: Bake, file: str, line: str, check: object) -> None:
    project = bake()
    path = Package(project).root / file
    path.write_text(f"{path.read_text()}\n{line}\n")
    found = check(Package(project))
    assert found and any(file.removesuffix(".py") in each for each in found)


@every_package
def test_sizes(baked: Bake, parallelism: str, task: str) -> None:
    package = package_of(baked, parallelism, task)
    assert max(package.lines.values()) < 300
    assert {name: lines for name, lines in functions(package).items() if lines > 60} == {}
    top = sizes(package)[TOP]
    assert len(top) <= 12 and sum(top) <= 1500


def test_size_of_the_default_package(baked: Bake) -> None:
    assert sum(Package(baked()).lines.values()) <= 8700


def test_the_documents_say_how_long_the_files_are(baked: Bake) -> None:
    """Rounded to ten lines."""
    strategies = [package_of(baked, name, "digits").lines for name in CHOICES["parallelism"]]
    least, most = (round(limit(lines["parallel"] for lines in strategies), -1) for limit in (min, max))
    pages = " ".join(
        " ".join((TEMPLATE / "docs" / f"{name}.md").read_text().split()) for name in ("questions", "project")
    )
    assert f"`parallel.py` ({least} to {most} lines)" in pages
    assert f"one file of {round(strategies[0]['train'], -1)} lines" in pages


def test_each_room_says_what_it_is_for(baked: Bake) -> None:
    project = baked()
    package = Package(project)
    rows = re.findall(r"^\| `(\w+)/` \|", (project / "README.md").read_text(), re.MULTILINE)
    assert rows == ROOMS[1:], "the README lists the rooms from the bottom up"
    for room in package.rooms():
        source = (package.root / room / "__init__.py").read_text()
        assert source.startswith('"""') and len(source.split('"""')[1].splitlines()) >= 3
        assert package.offers(room)


@every_package
def test_no_room_is_handed_all_settings(baked: Bake, parallelism: str, task: str) -> None:
    package = package_of(baked, parallelism, task)
    for name in package.trees:
        if "/" in name:
            assert not re.search(r"\bConfig\b", (package.root / f"{name}.py").read_text()), name


@every_package
def test_no_import_is_hidden(baked: Bake, parallelism: str, task: str) -> None:
    """A module of the package is imported by a statement; only the launcher starts the program by its name."""
    package = package_of(baked, parallelism, task)
    by_name = {
        name
        for name in package.trees
        if re.search(r'import_module\(f?"my_exp', (package.root / f"{name}.py").read_text())
    }
    assert by_name == {"launch/spawn"}


def test_a_wrong_setting_is_found_without_pytorch(baked: Bake) -> None:
    code = "import sys; import my_experiment.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=baked() / "src").returncode == 0


@every_package
def test_the_readme_quotes_the_source(baked: Bake, parallelism: str, task: str) -> None:
    """The lines that the README shows of a step stand in the package, in this order."""
    project = baked(parallelism=parallelism, task=task)
    section = (project / "README.md").read_text().split("## Read it\n")[1].split("\n## ")[0]
    blocks = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2 and sum(block.count("\n") for block in blocks) <= 30
    for file, block in zip(("train.py", "parallel.py"), blocks, strict=True):
        source = (Package(project).root / file).read_text()
        indented = "".join(f"        {line}" if line.strip() else line for line in block.splitlines(keepends=True))
        assert indented in source, block
