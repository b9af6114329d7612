"""cruft updates a project after a change of the template or of its answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from conftest import Bake, copy_tracked, read_tree, run
from runs import commit

CRUFT = Path(sys.executable).with_name("cruft")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of the template in a git repository of its own, with all tracked files in one commit."""
    copy = tmp_path / "template"
    copy_tracked(copy)
    commit(copy)
    return copy


def test_cruft_update_applies_template_changes_and_new_answers(repository: Path, tmp_path: Path, bake: Bake) -> None:
    run(CRUFT, "create", repository, "--no-input", "--output-dir", tmp_path, cwd=tmp_path)
    project = tmp_path / "my-experiment"
    commit(project)
    readme = repository / "{{cookiecutter.project_slug}}" / "README.md"
    readme.write_text(readme.read_text() + "\nA new line.\n")
    commit(repository)

    answers = {"launcher": "spawn", "tracker": "tensorboard"}
    run(CRUFT, "update", "--skip-apply-ask", "--variables-to-update", json.dumps(answers), cwd=project)
    updated = {name: data for name, data in read_tree(project).items() if not name.startswith((".git/", ".cruft"))}
    expected = read_tree(bake(**answers))
    assert updated.pop("README.md") == expected.pop("README.md") + b"\nA new line.\n"
    assert updated == expected


def test_cruft_loads_the_checks_of_each_version_that_it_renders(repository: Path, tmp_path: Path) -> None:
    """It renders the old and the new one in one process; the new one rejects what the old one took."""
    run(CRUFT, "create", repository, "--no-input", "--output-dir", tmp_path, cwd=tmp_path)
    project = tmp_path / "my-experiment"
    commit(project)
    checks = repository / "check_answers.py"
    rejection = 'return None if answers["author"] == "New" else ("author", "is old", "New")'
    checks.write_text(checks.read_text().replace("    return find_slug_fault(answers)", f"    {rejection}"))
    commit(repository)
    before = read_tree(project)
    result = run(CRUFT, "update", "--skip-apply-ask", cwd=project, expect=1)
    assert result.stderr.splitlines()[-2:] == ["error: author is 'Your Name', which is old. Try:", "  author=New"]
    assert read_tree(project) == before
