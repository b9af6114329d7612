"""cruft updates a project after a change of the template or of its answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from conftest import TEMPLATE, Bake, copy_tracked, read_tree, run
from runs import SHORT, checkpoints, commit, launch, losses

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


@pytest.fixture
def tagged(repository: Path) -> Path:
    """The same repository at its last tagged version; in a clone without tags, this version is taken for it."""
    tags = run("git", "tag", "--list", "v*", "--sort=-version:refname", cwd=TEMPLATE).stdout.split()
    if tags:
        run("git", "rm", "-r", "--quiet", ".", cwd=repository)
        run("git", "archive", "--output", repository / "old.tar", tags[0], cwd=TEMPLATE)
        run("tar", "-xf", "old.tar", cwd=repository)
        (repository / "old.tar").unlink()
        commit(repository)
    run("git", "tag", tags[0] if tags else "v0", cwd=repository)
    return repository


@pytest.mark.slow
def test_a_project_with_edits_and_checkpoints_gets_this_version_and_another_strategy(
    tagged: Path, tmp_path: Path, bake: Bake
) -> None:
    """What docs/updates.md describes: the edits stay, and the run resumes to the same losses."""
    run(CRUFT, "create", tagged, "--no-input", "--output-dir", tmp_path, cwd=tmp_path)
    project = tmp_path / "my-experiment"
    model = project / "src/my_experiment/model.py"
    model.write_text(
        model.read_text().replace("F.silu(self.norm(self.conv(images)))", "F.gelu(self.norm(self.conv(images)))")
    )
    (project / "src/my_experiment/own.py").write_text('"""A file of the reader."""\n')
    words = [*SHORT, "--checkpoint.every_steps", "3", "--run.dir"]
    launch(project, "train", *words, "runs/own", "--train.max_steps", "3")
    launch(project, "train", *words, "runs/whole")
    commit(project)

    run("git", "rm", "-r", "--quiet", ".", cwd=tagged)  # Otherwise, files would stay that this version lacks.
    copy_tracked(tagged)
    changes = tagged / "CHANGELOG.md"
    changes.write_text(changes.read_text() + "\nA later version.\n")
    commit(tagged)
    answers = {"parallelism": "fsdp"}
    run(CRUFT, "update", "--skip-apply-ask", "--variables-to-update", json.dumps(answers), cwd=project)
    updated, expected = read_tree(project), read_tree(bake(**answers))
    assert b"F.gelu(" in updated["src/my_experiment/model.py"]
    assert "src/my_experiment/own.py" in updated
    assert [name for name, text in expected.items() if updated.get(name) != text] == ["src/my_experiment/model.py"]

    assert "step 3 of 6" in launch(project, "train", *words, "runs/own").stdout
    assert checkpoints(project / "runs/own")[-1] == "step-00000006.pt"
    assert losses(project / "runs/own") == pytest.approx(losses(project / "runs/whole"), rel=1e-5)
