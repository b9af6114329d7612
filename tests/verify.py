"""Compares what runs a project's proof with what the template renders; ``make verify PROJECT=folder``.

It renders the version and the answers that the project's pyproject.toml states, or the commit in its .cruft.json, and
prints each file that differs. The certificate has to be what tests/proof.py writes, of these files and of all rows.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from conftest import BIN, CONTEXT, TEMPLATE, render_copy

# What runs the proof, and has to be as rendered.
COMPARED = ["Makefile", ".github/workflows/proof.yml", "scripts/launch.sh", "scripts/torchrun.py", "tests/**/*"]
# Python or pytest would read these, too.
ADDED = ["*.py", "*.ini", ".*.ini", "*.cfg", "pytest.toml", "src/*.py", "scripts/*.py", "witness/*"]
# The one file of these that an experiment may change, since the certificate prints it.
FREE = "tests/rules.py"
# What an experiment is made of: edits are listed, since a reader may want to know whether the loop is among them.
EDITED = ["src/*/*.py", "configs/*", FREE]
ROWS = ["tests/test_split.py", "tests/test_resume.py", "tests/test_evaluate.py"]
CHECK = TEMPLATE / "docs" / "adopt" / "test_adopted.py"


class Unknown(Exception):
    """What a project was rendered from cannot be found."""


def verify(project: Path) -> tuple[list[str], list[str]]:
    """Return what differs from the rendered files or is wrong with the certificate, and what an experiment may edit."""
    with TemporaryDirectory() as folder:
        rendered = render_as(project, Path(folder))
        found = [*compare_files(project, rendered), *check_certificate(project, rendered)]
        ours, theirs = find_files(project, EDITED), find_files(rendered, EDITED)
        return found, [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]


def read_toml(project: Path) -> dict[str, Any]:
    return tomllib.loads((project / "pyproject.toml").read_text())


def render_as(project: Path, folder: Path) -> Path:
    """Render what a project was rendered from, into a new folder."""
    settings = read_toml(project)
    answers = {**settings["tool"]["ddp-template"], "project_slug": settings["project"]["name"]}
    version = answers.pop("version")
    cruft = project / ".cruft.json"
    commit = json.loads(cruft.read_text())["commit"] if cruft.exists() else None
    template = TEMPLATE
    if commit or version != CONTEXT["_version"]:
        template = folder / "template"
        template.mkdir()
        archive = subprocess.run(("git", "archive", commit or f"v{version}"), cwd=TEMPLATE, capture_output=True)
        if archive.returncode:
            raise Unknown(f"this repository has no {commit or f'tag v{version}'}: fetch it")
        subprocess.run(("tar", "--extract"), cwd=template, input=archive.stdout, check=True)
    return render_copy(template, folder / "rendered", **answers)


def compare_files(project: Path, rendered: Path) -> Iterator[str]:
    """Yield the files that are not as rendered."""
    ours, theirs = find_files(project, COMPARED), find_files(rendered, COMPARED)
    for name in sorted({*theirs, *ours} - {FREE}):
        if name not in ours:
            yield f"{name}: deleted"
        elif name not in theirs:
            if name != f"tests/{CHECK.name}" or ours[name] != digest(CHECK):
                yield f"{name}: not rendered"
        elif ours[name] != theirs[name]:
            yield f"{name}: differs"
    for name in sorted(find_files(project, ADDED).keys() - find_files(rendered, ADDED).keys()):
        recorded = "; only the script that recorded it, run again, shows where it is from"
        yield f"{name}: not rendered{recorded if name.startswith('witness/') else ''}"
    if read_toml(project)["tool"].get("pytest") != read_toml(rendered)["tool"]["pytest"]:
        yield "pyproject.toml: the settings of pytest differ"


def find_files(project: Path, patterns: list[str]) -> dict[str, str]:
    """Return the hashes of the files that match patterns, by path."""
    paths = [path for pattern in patterns for path in project.glob(pattern) if path.is_file()]
    return {str(path.relative_to(project)): digest(path) for path in paths if "__pycache__" not in path.parts}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_certificate(project: Path, rendered: Path) -> Iterator[str]:
    """Yield where a certificate is not what its files and its rows give."""
    if not (project / "proof.md").exists() or not (project / "proof.json").exists():
        yield "proof.md, proof.json: missing"
        return
    report = json.loads((project / "proof.json").read_text())
    script = (
        f"import json, sys; sys.path.insert(0, {str(rendered / 'tests')!r}); import proof; r = json.load(sys.stdin)\n"
    )
    script += "print(proof.fill_in(r | {'summary': proof.summarize(r['rows'])}), end='')"
    command = [BIN / "python", "-c", script]
    written = subprocess.run(command, input=json.dumps(report), text=True, capture_output=True, check=True).stdout
    if written != (project / "proof.md").read_text():
        yield "proof.md: not what tests/proof.py writes of proof.json"
    for name, hashed in report["files"].items():
        if not (project / name).exists() or digest(project / name) != hashed:
            yield f"proof.md: made with another {name}"
    if report["rules"] != (project / FREE).read_text():
        yield f"proof.md: made with another {FREE}"
    command = [BIN / "pytest", "--collect-only", "--quiet", "-m", "", *ROWS]
    environment = os.environ | {"PYTEST_ADDOPTS": ""}
    listed = subprocess.run(command, cwd=rendered, env=environment, text=True, capture_output=True, check=True).stdout
    expected = {line.partition("::")[2] for line in listed.splitlines() if "::" in line}
    rows = {row["test"] for row in report["rows"]}
    yield from (f"proof.md: no row {name}" for name in sorted(expected - rows))
    for row in report["rows"]:
        if not row["outcome"].startswith(("holds", "skipped")):
            yield f"proof.md: {row['test']} {row['outcome']}"


def main(folder: str) -> int:
    """Print what differs; returns 1 if anything does, and 2 if there is nothing to compare with."""
    project = Path(folder)
    try:
        found, edited = verify(project)
    except (OSError, KeyError, Unknown) as error:
        print(f"error: {project}: {error}", file=sys.stderr)
        return 2
    print(*found or ["tests, Makefile and workflow are as rendered, and proof.md has all rows"], sep="\n")
    print("edited, as an experiment may:", ", ".join(edited) or "nothing")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
