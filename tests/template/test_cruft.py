"""cruft creates a project, and updates it after a change of the template or of its answers."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest
from conftest import BIN, Bake, commit, copy_template, read_tree, run

PROJECT = "{{cookiecutter.project_slug}}"
CRUFT = BIN / "cruft"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of the template in a git repository of its own, in one commit."""
    copy = copy_template(tmp_path / "template")
    commit(copy)
    return copy


@pytest.fixture
def project(repository: Path, tmp_path: Path) -> Path:
    """A default project that cruft has created, with its files in a commit."""
    run(CRUFT, "create", repository, "--no-input", "--output-dir", tmp_path, cwd=tmp_path)
    commit(tmp_path / "my-experiment")
    return tmp_path / "my-experiment"


def test_the_answers_that_cruft_keeps_can_be_read(project: Path) -> None:
    assert len((project / ".cruft.json").read_text().splitlines()) <= 60


def test_an_update_applies_template_changes_and_new_answers(repository: Path, project: Path, bake: Bake) -> None:
    """Another strategy, launcher and tracker become what they would have been at first; the reader's edits stay."""
    readme = repository / PROJECT / "README.md"
    readme.write_text(readme.read_text() + "\nA new line.\n")
    commit(repository)
    optimizer, own = project / "src/my_experiment/optim.py", project / "src/my_experiment/own.py"
    optimizer.write_text(optimizer.read_text().replace("fused=True", "fused=False"))
    own.write_text('"""A file of the reader."""\n')
    commit(project)

    answers = {"parallelism": "pipeline", "launcher": "spawn", "tracker": "tensorboard"}
    run(CRUFT, "update", "--skip-apply-ask", "--variables-to-update", json.dumps(answers), cwd=project)
    updated = {name: data for name, data in read_tree(project).items() if not name.startswith((".git/", ".cruft"))}
    expected = read_tree(bake(**answers))
    assert updated.pop("README.md") == expected.pop("README.md") + b"\nA new line.\n"
    assert updated.pop("src/my_experiment/own.py")
    edited = expected["src/my_experiment/optim.py"].replace(b"fused=True", b"fused=False")
    assert updated == expected | {"src/my_experiment/optim.py": edited}


@pytest.mark.parametrize(
    ("question", "answer", "better"), [("project_slug", "../x", "x"), ("author", None, "Your Name")]
)
def test_an_update_rejects_what_was_edited_in_the_answers_that_cruft_keeps(
    repository: Path, project: Path, question: str, answer: object, better: str
) -> None:
    (repository / PROJECT / "new.txt").touch()
    commit(repository)
    file = project / ".cruft.json"
    state = json.loads(file.read_text())
    state["context"]["cookiecutter"] |= {question: answer, "__package": "../y"}
    file.write_text(json.dumps(state))
    commit(project)
    before = read_tree(project.parent)
    words = [CRUFT, "update", "--skip-apply-ask"]
    result = subprocess.run(words, cwd=project, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    error, advice = result.stderr.splitlines()[-2:]
    assert (
        error.startswith(f"error: {question} is {answer!r}, which ")
        and advice == f"  {shlex.quote(f'{question}={better}')}"
    )
    assert read_tree(project.parent) == before


def test_an_update_loads_the_checks_of_each_version_that_it_renders(repository: Path, project: Path) -> None:
    """It renders the old and the new one in one process; the new one rejects what the old one took."""
    checks = repository / "check_answers.py"
    rejection = 'return None if answers["author"] == "New" else ("author", "is old", "New")'
    old = "    return find_slug_fault("
    assert checks.read_text().count(old) == 1
    checks.write_text(checks.read_text().replace(old, f"    {rejection}\n{old}"))
    commit(repository)
    before = read_tree(project)
    words = [CRUFT, "update", "--skip-apply-ask"]
    result = subprocess.run(words, cwd=project, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-2:] == ["error: author is 'Your Name', which is old. Try:", "  author=New"]
    assert read_tree(project) == before
