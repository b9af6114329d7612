"""The habits of rendered repositories and of this one, as sp-repo-review, zizmor and the formats' rules see them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import CHOICES, TEMPLATE, Bake, copy_tracked, run

BIN = Path(sys.executable).parent
# Together, these have every file and every line that these tools look at.
ANSWERS: list[dict[str, Any]] = [
    {},
    {"license": "none", "docker": True, "tracker": CHOICES["tracker"][-1], "task": "control"},
    {"license": "Proprietary", "task": "language"},
]


@pytest.fixture(scope="module", params=[*range(len(ANSWERS)), "template"])
def repository(request: pytest.FixtureRequest, baked: Bake, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rendered project, or a copy of the template."""
    if request.param != "template":
        return baked(**ANSWERS[request.param])
    copy = tmp_path_factory.mktemp("template")
    copy_tracked(copy)
    return copy


def test_sp_repo_review_finds_only_what_was_declined_with_a_reason(repository: Path) -> None:
    words = [BIN / "sp-repo-review", ".", "--format", "json"]
    result = subprocess.run(words, cwd=repository, capture_output=True, text=True, timeout=120)
    review = json.loads(result.stdout)
    assert not [(name, check["description"]) for name, check in review["checks"].items() if check["result"] is False]
    declined = tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["repo-review"]["ignore"]
    assert all(declined.values())
    unknown = [name for name in declined if not any(check.startswith(name) for check in review["checks"])]
    assert not unknown
    passed = [name for name, check in review["checks"].items() if check["result"]]
    assert len(passed) > 25


def test_zizmor_finds_nothing(repository: Path) -> None:
    result = run(BIN / "zizmor", "--offline", "--no-progress", "--persona", "pedantic", ".", cwd=repository)
    assert "No findings to report" in result.stdout
    assert "zizmor: ignore" not in "".join(path.read_text() for path in (repository / ".github").rglob("*.yml"))


def test_actions_are_pinned_to_commits_the_same_everywhere() -> None:
    """By a hash, and with the version for readers; GitHub's own actions alone."""
    workflows = [*TEMPLATE.glob(".github/workflows/*"), *TEMPLATE.glob("*/.github/workflows/*")]
    uses = {line for path in workflows for line in re.findall(r"uses: (.*)", path.read_text())}
    assert len(workflows) == 2
    assert all(re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line) for line in uses)
    assert len({line.partition("@")[0] for line in uses}) == len(uses)


def test_the_citation_has_what_its_schema_requires(repository: Path) -> None:
    """And nothing else than fields of version 1.2.0, of which these are a part."""
    citation = yaml.safe_load((repository / "CITATION.cff").read_text())
    assert citation.keys() - {"license"} == {"cff-version", "message", "type", "title", "abstract", "authors"}
    assert (citation["cff-version"], citation["type"]) == ("1.2.0", "software")
    assert all(author.keys() == {"name"} for author in citation["authors"])
    assert citation.get("license", "MIT") in ("MIT", "Apache-2.0", "BSD-3-Clause")  # Of the schema's list.


def test_dependabot_watches_what_is_pinned(repository: Path) -> None:
    updates = yaml.safe_load((repository / ".github" / "dependabot.yml").read_text())["updates"]
    watched = {update["package-ecosystem"] for update in updates}
    assert watched == {"pip", "github-actions"} | ({"docker"} if (repository / "Dockerfile").exists() else set())
    for update in updates:
        assert update["schedule"] == {"interval": "weekly"}
        (group,) = update["groups"].values()
        assert group == {"patterns": ["*"]}
        for folder in update.get("directories", [update.get("directory")]):
            assert (repository / folder.strip("/")).is_dir()


def test_a_project_without_a_license_does_not_mention_one(baked: Bake) -> None:
    project = baked(**ANSWERS[1])
    assert not (project / "LICENSE").exists()
    settings = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    assert not settings.keys() & {"license", "license-files"}
    for name in ("README.md", "AGENTS.md", "CITATION.cff", "Dockerfile", ".dockerignore", "Makefile"):
        assert "licen" not in (project / name).read_text().lower()


def test_what_agents_read_is_about_files_that_exist(repository: Path) -> None:
    text = (repository / "AGENTS.md").read_text()
    assert len(text.splitlines()) < 60
    names = re.findall(r"`((?:tests/)?\w+\.(?:py|md|json|yaml))`", text)
    files = {path.name for path in repository.rglob("*")}
    assert len(names) > 2 and all(Path(name).name in files for name in names)
