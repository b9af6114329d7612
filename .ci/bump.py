"""Moves every pin of the template to its newest version at once, and prints what it moved; `make bump` runs it.

`make bump NAME=numpy` moves one package, and others only as far as it needs.
`make address` writes the address of the repository, `_repository` in cookiecutter.json, into the pages that name it.

It upgrades .venv first, so pip has found the versions to fit each other. ``contents`` derives all files that hold pins
from what is installed, which tests/template/test_pins.py compares with those files.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution, distributions, packages_distributions, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TEMPLATE = Path(__file__).parents[1]
PROJECT, CHOICES = TEMPLATE / "{{cookiecutter.project_slug}}", TEMPLATE / "templates"
REQUIREMENTS, RESERVED = TEMPLATE / "requirements.txt", TEMPLATE / "reserved.json"
WORKFLOWS = [TEMPLATE / ".github/workflows/test.yml", *sorted((PROJECT / ".github" / "workflows").glob("*.yml"))]
# What `make setup` installs or builds with, and no metadata of a package names.
TOOLS = ["pip", "editables"]
# What only PyTorch's builds with CUDA need; these pin it themselves.
CUDA = ["cuda", "cuda-bindings", "cuda-pathfinder", "nvidia", "triton"]
# An import that a module does without: the first statement under a condition, or what is looked up before.
CONDITION, IMPORT = r"\b(?:try|else|(?:if|elif|except)\b.*):.*\n", r"\s+(?:from +(?=\S+ import )|import +)"
OPTIONAL = re.compile(rf"""(?:{CONDITION}{IMPORT}|find_spec\(\s*["'])([A-Za-z]\w*)""".encode())


def main() -> None:
    """Upgrade the environment, or a package, and write all files that hold pins; or write the repository's address."""
    if sys.argv[1:] == ["address"]:
        return write(addresses())
    if sys.version_info[:2] != (3, 11):
        sys.exit("error: .venv has another Python than 3.11, whose packages are pinned")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--upgrade"]
    if sys.argv[1:]:
        subprocess.run([*pip, *sys.argv[1:]], check=True)
        return write(contents())
    unpinned = [line.split("==")[0] for line in REQUIREMENTS.read_text().splitlines() if line[:1].isalpha()]
    ranges = [text for requirements in needs().values() for text in requirements]
    subprocess.run([*pip, "--upgrade-strategy", "eager", *unpinned, *ranges], check=True)
    write(contents() | actions())
    print(*not_taken(), sep="\n")


def not_taken() -> Iterator[str]:
    """Yield the newer versions that pip did not take, each with the requirements that exclude it."""
    words = [sys.executable, "-m", "pip", "--disable-pip-version-check", "list", "--outdated", "--format=json"]
    own = [("this template", Requirement(text)) for requirements in needs().values() for text in requirements]
    others = [(f"{d.name} {d.version}", Requirement(text)) for d in distributions() for text in d.requires or []]
    for each in json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout):
        limits = {
            f"{who} requires {need.name}{need.specifier}"
            for who, need in own + others
            if canonicalize_name(need.name) == canonicalize_name(each["name"]) and applies(need, frozenset())
            if not need.specifier.contains(each["latest_version"])
        }
        reason = "; ".join(sorted(limits)) or "`pip install --dry-run` of it says why"
        yield f"{each['name']} stays at {each['version']}, not {each['latest_version']}: {reason}"


def contents() -> dict[Path, str]:
    """Return the files that hold pins of packages, with the versions that are installed."""
    files = {path: pins(path, requirements) for path, requirements in needs().items()}
    hooks = [folder / ".pre-commit-config.yaml" for folder in (TEMPLATE, PROJECT)]
    for path in (REQUIREMENTS, PROJECT / "pyproject.toml", *hooks):
        files[path] = re.sub(r"([\w-]+)==[\w.]+", lambda pin: f"{pin[1]}=={release(pin[1])}", path.read_text())
    names = {reason: [f'"{name}"' for name in names] for reason, names in reserved().items()}
    wrap = textwrap.TextWrapper(width=115, initial_indent=" " * 4, subsequent_indent=" " * 4, break_on_hyphens=False)
    lists = [f'  "{reason}": [\n{wrap.fill(", ".join(each))}\n  ]' for reason, each in names.items()]
    return files | {RESERVED: "{\n" + ",\n".join(lists) + "\n}\n"}


def needs() -> dict[Path, list[str]]:
    """Return what each file of constraints is about: the requirements of the project, and of choices in addition."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text().replace("#::", "# "))
    requirements = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    found = {PROJECT / "constraints.txt": [*requirements, *project["build-system"]["requires"], *TOOLS]}
    for path in sorted([*CHOICES.rglob("extra.toml"), *CHOICES.rglob("dependencies.toml")]):
        found[path.with_name("constraints.txt")] = re.findall(r'"(.+?)"', path.read_text())
    return found


def pins(path: Path, requirements: list[str]) -> str:
    """Return a file of constraints with the versions of requirements and of what they require; its comments stay."""
    packages = closure(requirements)
    if path.parent != PROJECT:
        packages -= closure(needs()[PROJECT / "constraints.txt"])
    names = sorted((distribution(name).metadata["Name"] for name in packages), key=str.casefold)
    lines = "".join(f"{name}=={release(name)}\n" for name in names)
    return re.sub(r"^(\w.*\n)+", lines, path.read_text(), count=1, flags=re.MULTILINE)


def release(name: str) -> str:
    """Return the version of an installed package, without the build of PyTorch."""
    return version(name).split("+")[0]


def closure(requirements: Iterable[str]) -> set[str]:
    """Return the installed packages that requirements need, and those that these need; none of CUDA."""
    todo, found = [Requirement(text) for text in requirements], set[tuple[str, frozenset[str]]]()
    while todo:
        need = todo.pop()
        name, extras = canonicalize_name(need.name), frozenset(need.extras)
        if (name, extras) in found or re.match("|".join(CUDA), name):
            continue
        try:
            required = map(Requirement, distribution(name).requires or [])
        except PackageNotFoundError:
            continue  # Of another version of Python.
        found.add((name, extras))
        todo += [each for each in required if applies(each, extras)]
    return {name for name, _ in found}


def applies(need: Requirement, extras: frozenset[str]) -> bool:
    """Return whether a requirement applies here, with some extras of the package that states it."""
    return need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras or [""])


def reserved() -> dict[str, list[str]]:
    """Return the slugs that no project may have, by the reason; what follows the first three is written by hand."""
    packages = {name for requirements in needs().values() for name in closure(requirements)}
    owners = packages_distributions().items()
    needed = {*CUDA} | packages | {module for module, names in owners if packages & {*map(canonicalize_name, names)}}
    folders = {path.name for path in PROJECT.iterdir() if path.is_dir()}
    tests = {name for path in (PROJECT / "tests").iterdir() for name in re.findall(r"(\w+)\.py\b", path.name)}
    lists = json.loads(RESERVED.read_text())
    known = {*slugs(needed)}.union(*[*lists.values()][3:])
    found = (slugs(needed), [name for name in slugs(optional(packages)) if name not in known], slugs(folders | tests))
    return lists | dict(zip(lists, found, strict=False))


def optional(packages: Iterable[str]) -> set[str]:
    """Return the modules that packages import only if they are there: a project of that name would be taken for one."""
    files = [file.locate() for name in packages for file in distribution(name).files or [] if file.suffix == ".py"]
    return {module.decode() for file in files for module in OPTIONAL.findall(Path(file).read_bytes())}


def slugs(names: Iterable[str]) -> list[str]:
    """Return names as slugs, those that are one, but of no module of Python, which check_answers.py rejects."""
    standard = {canonicalize_name(name) for name in sys.stdlib_module_names}
    return sorted({name for name in map(canonicalize_name, names) if re.fullmatch("[a-z][a-z0-9-]*", name)} - standard)


def addresses() -> dict[Path, str]:
    """Return the pages that name the repository, with the address in cookiecutter.json in place of theirs."""
    new = json.loads((TEMPLATE / "cookiecutter.json").read_text())["_repository"]
    names = ["*.md", "CITATION.cff", "docs/*.md", ".github/ISSUE_TEMPLATE/*"]
    pages = {path: path.read_text() for name in names for path in sorted(TEMPLATE.glob(name))}
    old = re.findall(r"^cookiecutter (https:\S+)", pages[TEMPLATE / "README.md"], re.MULTILINE)[0]
    return {path: text.replace(old, new) for path, text in pages.items() if old in text}


def write(files: dict[Path, str]) -> None:
    """Write files, and print the words that changed."""
    for path, text in files.items():
        before, after = set(path.read_text().split()), set(text.split())
        path.write_text(text)
        if moved := [*(f"-{word}" for word in before - after), *(f"+{word}" for word in after - before)]:
            print(f"{path.relative_to(TEMPLATE)}:", *sorted(moved, key=lambda word: word[1:]), sep="\n    ")


def actions() -> dict[Path, str]:
    """Return the workflows, with the newest release of each action; one that is out of reach stays as it is."""
    files = {path: path.read_text() for path in WORKFLOWS}
    for action in sorted({action for text in files.values() for action in re.findall(r"uses: ([\w/-]+)@", text)}):
        commits = releases(action)
        for newest in sorted(commits)[-1:]:
            pattern, pin = rf"{action}@\w+ # v[\d.]+", f"{action}@{commits[newest]} # v{'.'.join(map(str, newest))}"
            files = {path: re.sub(pattern, pin, text) for path, text in files.items()}
    return files


def releases(action: str) -> dict[tuple[int, ...], str]:
    """Return the commits of an action's releases, by number."""
    words = ["git", "ls-remote", "--tags", f"https://github.com/{action}"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        print(f"{action} stays as it is: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
    # The commit of an annotated tag (^{}) follows the tag itself, and takes its place.
    found = re.findall(r"^(\w+)\trefs/tags/v(\d+\.\d+\.\d+)(?:\^\{\})?$", done.stdout, re.MULTILINE)
    return {tuple(map(int, number.split("."))): commit for commit, number in found}


if __name__ == "__main__":
    main()
