"""All pairs of answers, weekly all combinations, render to clean files; a file that several share is checked once."""

from __future__ import annotations

import itertools
import json
import os
import re
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import yaml
from conftest import BIN, CHOICES, CONTEXT, TEMPLATE, Bake, run
from renders import File, Rendering, alike, combinations, covering, mixed, pairs, refusal, write
from traces import TRACES, find_traces, words

PACKAGE = "src/my_experiment"
# The same under every strategy: the loop, and what it calls.
SHARED = ("train", "experiment", "losses", "loader", "evaluate", "checkpoint", "files", "distributed", "failures")
SHARED += ("logger", "plot", "optim", "task", "model", "dataset")


@pytest.fixture(scope="module", params=["pairs", pytest.param("all", marks=pytest.mark.weekly)])
def rendering(request: pytest.FixtureRequest) -> Rendering:
    return Rendering(pairs() if request.param == "pairs" else combinations())


def test_a_combination_renders_or_is_refused(rendering: Rendering) -> None:
    """Of any two choices, some project has both, or a choice states why it refuses the other one."""
    assert not rendering.failures
    found = {pair for project in rendering.projects for pair in itertools.combinations(project.answers.items(), 2)}
    wanted = {pair for answers in combinations() for pair in itertools.combinations(answers.items(), 2)}
    default = {name: values[0] for name, values in CHOICES.items()}
    assert all(refusal(default | dict(pair)) for pair in wanted - found)


def test_projects_are_rendered_as_cookiecutter_does_it(rendering: Rendering, bake: Bake) -> None:
    for i, answers in enumerate(mixed()):
        (files,) = [project.files for project in rendering.projects if project.answers == answers]
        folder = bake(str(i), **answers)
        paths = [path for path in folder.rglob("*") if path.is_file()]
        baked = [File(str(path.relative_to(folder)), path.read_bytes(), os.access(path, os.X_OK)) for path in paths]
        assert {file.path: file for file in baked} == files


def test_every_branch_of_the_templates_is_taken(rendering: Rendering) -> None:
    """What no answers lead to can be deleted."""
    branches, taken = rendering.recorder.branches, rendering.recorder.taken
    assert not branches - taken, "\n".join(["never taken:", *sorted(branches - taken)])


def test_every_choice_changes_a_file(rendering: Rendering) -> None:
    """Whatever the other answers are; the table of answers does not count."""
    trees: dict[frozenset[tuple[str, str]], object] = {}
    for project in rendering.projects:
        files = frozenset(id(file) for path, file in project.files.items() if path != "pyproject.toml")
        assert trees.setdefault(files, project.answers) == project.answers, (
            f"{project.answers} renders to the same files as {trees[files]}"
        )


def test_the_loop_is_the_same_under_every_strategy(rendering: Rendering) -> None:
    groups = alike(rendering.projects, "parallelism")
    assert max(map(len, groups)) == len(CHOICES["parallelism"])
    for projects in groups:
        for name in SHARED:
            assert len({project.files[f"{PACKAGE}/{name}.py"] for project in projects}) == 1, name


def test_rendered_files_parse(rendering: Rendering) -> None:
    for file in rendering.owners:
        parse(file.path, file.content)
        assert file.executable or not file.path.endswith(".sh"), file.path


def parse(name: str, content: bytes) -> None:
    """Parse a file according to its suffix; raises an error if it is invalid."""
    suffix = Path(name).suffix
    if suffix == ".py":
        compile(content, name, "exec")
    elif suffix in (".yaml", ".yml", ".cff"):
        list(yaml.safe_load_all(content))
    elif suffix == ".json":
        json.loads(content)
    elif suffix == ".toml":
        tomllib.loads(content.decode())
    elif suffix == ".xml":
        ElementTree.fromstring(content)


def test_pyproject_records_the_answers(rendering: Rendering) -> None:
    for project in rendering.projects:
        settings = tomllib.loads(project.files["pyproject.toml"].content.decode())
        answers = {k: str(v).lower() if isinstance(v, bool) else v for k, v in project.answers.items()}
        assert settings["tool"]["ddp-template"] == answers | {"version": CONTEXT["_version"]}


def test_files_end_with_one_newline_and_have_no_stray_white_space(rendering: Rendering) -> None:
    for file in rendering.texts():
        assert file.text.endswith("\n") and not file.text.endswith("\n\n"), file.path
        assert not re.search(r"[ \t]+$", file.text, re.MULTILINE), file.path
        assert "\n\n\n" not in file.text or file.path.endswith((".py", "LICENSE")), file.path


def test_the_code_passes_ruff(rendering: Rendering, tmp_path: Path) -> None:
    """In whole projects, because the order of imports depends on the folders."""
    projects = covering(rendering.projects, lambda file: file.path.endswith(".py"))
    for number, project in enumerate(projects):
        write(project.files.values(), tmp_path / str(number))
    run(BIN / "ruff", "format", "--check", "--no-cache", ".", cwd=tmp_path)
    run(BIN / "ruff", "check", "--no-cache", ".", cwd=tmp_path)


@pytest.mark.long
def test_the_code_passes_mypy(rendering: Rendering, tmp_path: Path) -> None:
    """One run for packages of several names, so that PyTorch is analyzed once."""
    projects = covering(rendering.projects, lambda file: file.path.startswith(PACKAGE) and file.path.endswith(".py"))
    (tmp_path / "src").mkdir()
    for number, project in enumerate(projects):
        source = write(project.files.values(), tmp_path / str(number)) / PACKAGE
        source.rename(tmp_path / "src" / f"package_{number}")
    (tmp_path / "0" / "pyproject.toml").rename(tmp_path / "pyproject.toml")
    run(BIN / "mypy", "--cache-dir", tmp_path / "cache", cwd=tmp_path)


def test_scripts_pass_shellcheck(rendering: Rendering, tmp_path: Path) -> None:
    scripts = [file for file in rendering.texts() if file.content.startswith(b"#!") and b"sh" in file.content[:25]]
    paths = [write([file], tmp_path / str(i)) / file.path for i, file in enumerate(scripts)]
    run(BIN / "shellcheck", *paths, TEMPLATE / ".ci" / "run", cwd=TEMPLATE)


def test_dockerfiles_pass_hadolint(rendering: Rendering, tmp_path: Path) -> None:
    files = [file for file in rendering.texts() if file.path == "Dockerfile"]
    paths = [write([file], tmp_path / str(i)) / file.path for i, file in enumerate(files)]
    assert paths
    run(BIN / "hadolint", *paths, cwd=TEMPLATE)


def test_a_project_has_no_traces_of_the_template_or_of_other_choices(rendering: Rendering) -> None:
    traces = set()
    for file in rendering.texts():
        if not file.path.startswith(".github/"):  # GitHub's expressions have braces, too.
            traces |= {f"{file.path}: {found}" for found in words(r"cookiecutter|\{\{|#::|::#|#//|//#", file.text)}
        traces |= set(find_traces(file, rendering.owners[file]))
    assert not traces, "\n".join(sorted(traces))


def test_each_trace_is_left_by_its_own_choice(rendering: Rendering) -> None:
    """Each alternative of a pattern: one that matches nothing here would find nothing elsewhere either."""
    for (question, value), pattern in TRACES.items():
        projects = [project for project in rendering.projects if project.answers[question] == value]
        owned = {file for project in projects for file in project.files.values() if not file.path.endswith(".npz")}
        for word in pattern.split("|"):
            assert any(words(word, file.text) for file in owned), f"{question}={value}: {word}"
