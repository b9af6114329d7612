"""All pins are those of one environment, wherever they stand, and `make bump` finds the newest ones."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import bump
import pytest
import yaml
from conftest import run


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions of Python need some other packages")
def test_the_files_that_hold_pins_are_what_is_installed() -> None:
    for path, text in bump.contents().items():
        assert path.read_text() == text, f"{path}: `make bump` writes it"


def test_workflows_agree_on_actions_and_on_versions_of_python() -> None:
    texts = [path.read_text() for path in bump.WORKFLOWS]
    used = set(re.findall(r"uses: (.*)", "".join(texts)))
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each) for each in used), used
    assert len({each.split("@")[0] for each in used}) == len(used), used
    jobs = [job for text in texts for job in yaml.safe_load(text)["jobs"].values()]
    matrices = [job["strategy"]["matrix"] for job in jobs if "matrix" in job.get("strategy", {})]
    assert len({str(matrix["python"]) for matrix in matrices if "python" in matrix}) == 1


def test_the_newest_release_of_an_action_is_pinned_by_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From repositories on this machine, in place of those of GitHub."""
    commits = {}
    for action in {action for path in bump.WORKFLOWS for action in re.findall(r"uses: ([\w/-]+)@", path.read_text())}:
        folder = tmp_path / action
        folder.mkdir(parents=True)
        git = ("git", "-c", "user.name=Test", "-c", "user.email=test@example.org")
        run(*git, "init", "--quiet", cwd=folder)
        for tag in ("v9.9.1", "v10.0.0", "v10"):
            run(*git, "commit", "--quiet", "--allow-empty", "--message", tag, cwd=folder)
            run(*git, "tag", "--annotate", "--message", tag, tag, cwd=folder)
        commits[action] = run("git", "rev-parse", "v10.0.0^{commit}", cwd=folder).stdout.strip()
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.{tmp_path}/.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://github.com/")
    for path, text in bump.actions().items():
        pins = re.findall(r"uses: ([\w/-]+)@(\w+) # (.*)", text)
        assert pins and all((commit, number) == (commits[action], "v10.0.0") for action, commit, number in pins), path
