"""Unusual answers: rejected with a reason and a command that works, or rendered correctly."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from answers import DEFAULT_SLUGS, ask, check_project, derive, only_project, retry
from conftest import CHOICES, CONTEXT, TEMPLATE, Bake, read_tree, run
from cookiecutter.main import cookiecutter
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import check_answers

BIN = Path(sys.executable).parent
LIMIT = CONTEXT["_slug_limit"]

REJECTED = [
    ("project_slug", "torch", "existing module"),
    ("project_slug", "test", "existing module"),
    ("project_slug", "Json", "existing module"),
    ("project_slug", "PIL", "existing module"),
    ("project_slug", "Typing_Extensions", "existing module"),
    ("project_slug", "test_split", "existing module"),
    ("project_slug", "class", "keyword"),
    ("project_slug", "3d-vision", "letters and digits"),
    ("project_slug", "my experiment", "letters and digits"),
    ("project_slug", "-x", "letters and digits"),
    ("project_slug", "a/b", "letters and digits"),
    ("project_slug", "../x", "letters and digits"),
    ("project_slug", "/etc/x", "letters and digits"),
    ("project_slug", "a/../../b", "letters and digits"),
    ("project_slug", "..", "letters and digits"),
    ("project_slug", "$(reboot)", "letters and digits"),
    ("project_slug", "{{ 'abc' }}", "letters and digits"),
    ("project_slug", "x" * (LIMIT + 1), "longer than"),
    ("project_slug", "x" * 300, "longer than"),
    ("project_slug", "", "empty"),
    ("project_name", "", "empty"),
    ("project_name", " \u3000\xa0", "empty"),
    ("project_name", "\u200d", "empty"),
    ("project_name", "two\nlines", "control character"),
    ("project_name", "two\u2028lines", "control character"),
    ("project_name", "two\x85lines", "control character"),
    ("project_name", "bell\a", "control character"),
    ("project_name", "right\u202eleft", "control character"),
    ("project_name", "\u2066isolated", "control character"),
    ("project_name", os.fsdecode(b"caf\xe9"), "control character"),  # Not UTF-8.
    ("project_name", "not a character \ufffe", "control character"),
    ("description", "", "empty"),
    ("description", "two\nlines", "control character"),
    ("author", "", "empty"),
    ("author", "A\x1b[31m", "control character"),
]

ACCEPTED = [
    'The "best" one',
    "It's mine",
    r"back\slash \n \x41",
    "$(touch hacked) `touch hacked` ; rm -rf *",
    "It costs $5 & $HOME",
    "<b>&amp;</b> %s {} {0} }} 100%",
    "{% raw %} {# no comment #}",
    "{{ 1 }} {{ unknown }} {{ 1",  # Not evaluated, nor is what follows.
    "{{ cookiecutter.update(license='none') }}",
    "#:: if true ::#A#:: endif ::# #:: raw ::# #// nobody",
    "\\",
    "Ünïcödé 東京 🔥",
    "\U0001f469\u200d\U0001f4bb",  # One emoji of two, with a joiner.
    "no\xa0break, full\u3000width",
    "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",  # Persian, with a non-joiner.
    "\u05e9\u05dc\u05d5\u05dd (right to left)",
    '"""',
    "---",
    "  blanks around ",
    "\xa0\u3000other blanks\u3000",
    "x" * 500,
]


@pytest.mark.parametrize("answers", [{"paralelism": "ddp"}, {"tracker": "tensorbored"}, {"docker": "false"}])
def test_the_fixture_rejects_unknown_questions_and_choices(bake: Bake, answers: dict[str, str]) -> None:
    with pytest.raises(AssertionError):
        bake(**answers)


@pytest.mark.parametrize(("question", "answer", "reason"), REJECTED)
def test_an_answer_that_cannot_work_is_rejected_with_a_command_that_works(
    question: str, answer: str, reason: str, tmp_path: Path
) -> None:
    result = ask(tmp_path, launcher="spawn", **{question: answer})
    assert result.returncode == 1
    message = result.stderr.splitlines()[0]
    assert message.startswith(f"error: {question} is {answer!r}, which ")
    assert reason in message
    # The printed command works: it renders the project, and keeps the other answers.
    settings = tomllib.loads((retry(tmp_path, result) / "pyproject.toml").read_text())
    assert settings["tool"]["ddp-template"]["launcher"] == "spawn"


@pytest.mark.parametrize("question", ["parallelism", "launcher", "docker"])
def test_an_unknown_choice_is_rejected(question: str, tmp_path: Path) -> None:
    result = ask(tmp_path, **{question: "nothing"})
    assert result.returncode == 1
    assert "nothing provided for" in result.stderr and question in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_name_may_contain_any_other_character(bake: Bake, name: str) -> None:
    project = bake(project_name=name, author=name, description=name, project_slug="own-name", docker=True)
    check_project(project, name.strip(), name.strip(), "own-name", name.strip())
    assert not list(project.rglob("hacked"))
    run(BIN / "ruff", "format", "--check", "--no-cache", ".", cwd=project)
    run(BIN / "ruff", "check", "--no-cache", ".", cwd=project)


def test_names_change_no_code(bake: Bake) -> None:
    """Otherwise the code would have to be linted and run with every name."""
    answers = {"project_slug": "own-name", "docker": True, "cluster": "kubernetes"}
    tree = read_tree(bake("default", **answers))
    other = {"project_name": "Other", "author": "Somebody Else", "description": "Something else"}
    named = read_tree(bake("named", **other, **answers))
    different = {name for name in tree.keys() | named.keys() if tree.get(name) != named.get(name)}
    package = "src/own_name/__init__.py"
    assert different == {"README.md", "LICENSE", "CITATION.cff", "pyproject.toml", ".devcontainer.json", package}
    assert tree[package].split(b"\n", 1)[1] == named[package].split(b"\n", 1)[1]  # Only the docstring.


def test_a_slug_may_have_blanks_around_it(bake: Bake) -> None:
    check_project(bake(project_slug="  my_Slug2\xa0"), "My Experiment", "Your Name", "my_Slug2")


@pytest.mark.parametrize(("name", "slug"), DEFAULT_SLUGS.items())
def test_the_default_slug_is_derived_from_the_name(name: str, slug: str, tmp_path: Path) -> None:
    result = ask(tmp_path, project_name=name)
    assert result.returncode == 0, result.stderr
    check_project(only_project(tmp_path), name.strip(), "Your Name", slug)


@pytest.mark.parametrize("slug", ["../x", "a/../../b", "..", ".", "", "\\x", "x" * 300, "ABSOLUTE"])
def test_without_hooks_no_slug_leads_out_of_the_output_folder(slug: str, tmp_path: Path) -> None:
    slug = str(tmp_path / "absolute") if slug == "ABSOLUTE" else slug
    answers = {"project_slug": slug}
    with pytest.raises(SystemExit, match=r"^error: project_slug is .*\n  project_slug="):
        cookiecutter(
            str(TEMPLATE), no_input=True, extra_context=answers, output_dir=str(tmp_path / "out"), accept_hooks=False
        )
    assert not list(tmp_path.iterdir())


def test_the_code_passes_ruff_with_the_longest_slug(bake: Bake) -> None:
    for parallelism in CHOICES["parallelism"]:
        for launcher in CHOICES["launcher"]:
            answers = {"parallelism": parallelism, "launcher": launcher, "task": "language", "tracker": "tensorboard"}
            project = bake(f"{parallelism}-{launcher}", project_slug="x" * LIMIT, **answers)
    run(BIN / "ruff", "format", "--check", "--no-cache", ".", cwd=project.parents[1])
    run(BIN / "ruff", "check", "--no-cache", ".", cwd=project.parents[1])


def packages_of_a_project(projects: list[Path]) -> set[str]:
    """Return the canonical names of all packages that projects or their recipes install, and of their dependencies."""
    pinned = [line for project in projects for line in (project / "constraints.txt").read_text().splitlines()]
    recipes = [path.read_text() for project in projects for path in (project / "docs").iterdir()]
    todo = [Requirement(line).name for line in pinned if line and not line.startswith("#")]
    installs = [line for text in recipes for line in re.findall(r"^\.venv/bin/pip install (.+)", text, re.M)]
    todo += [name for line in installs for name in line.split()]
    found: set[str] = set()
    while todo:
        name = canonicalize_name(todo.pop())
        if name not in found:
            found.add(name)
            try:
                needed = [Requirement(text) for text in requires(name) or []]
            except PackageNotFoundError:
                continue  # Not needed on this machine.
            todo += [need.name for need in needed if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def taken(baked: Bake) -> set[str]:
    """The names of all modules and packages that a project's own name must not shadow, as pip compares names."""
    projects = [baked(tracker=tracker, task=task) for tracker in CHOICES["tracker"] for task in CHOICES["task"]]
    packages = packages_of_a_project(projects)
    modules = {
        module for module, owners in packages_distributions().items() if packages & set(map(canonicalize_name, owners))
    }
    tests = {path.stem for project in projects for path in (project / "tests").glob("*.py")}
    assert packages >= {"torch", "tensorboard", "python-dateutil", "datasets", "pandas"}
    assert modules >= {"PIL", "torchgen", "dateutil", "_pytest"} and tests >= {"support", "conftest", "test_generate"}
    names = {canonicalize_name(name) for name in packages | modules | tests | sys.stdlib_module_names}
    return {name for name in names if re.fullmatch("[a-z][a-z0-9]*(-[a-z0-9]+)*", name)}  # Others are no slugs anyway.


def test_no_slug_is_the_name_of_a_module_or_a_package_that_the_project_needs(taken: set[str]) -> None:
    answers = derive()

    def is_accepted(slug: str) -> bool:
        return check_answers.find_slug_fault(answers | {"project_slug": slug}) is None

    assert len(taken) > 300
    assert not set(filter(is_accepted, taken))
    for reason, names in CONTEXT["_reserved"].items():
        others = {name for other, its in CONTEXT["_reserved"].items() if other != reason for name in its}
        assert not others & set(names)
        assert names == sorted(names) and all(canonicalize_name(name) == name for name in names)
        assert all(is_accepted(f"my-{name}") for name in names)


@pytest.mark.parametrize("name", ["It costs $5 & $HOME", 'It\'s "mine", $(id) `id` \\ # %'])
def test_make_demo_passes_on_a_name_as_it_is(name: str, tmp_path: Path) -> None:
    """The command that renders, as make would run it; the whole of `make demo` takes longer."""
    commands = run("make", "--dry-run", "demo", f"project_name={name}", cwd=TEMPLATE).stdout.splitlines()
    (command,) = [line for line in commands if "/cookiecutter . --no-input" in line]
    words = command.replace(str(TEMPLATE / ".venv" / "bin"), str(BIN)).replace(
        " demo ", f" {shlex.quote(str(tmp_path))} "
    )
    subprocess.run(words, shell=True, cwd=TEMPLATE, check=True, timeout=60)
    (project,) = tmp_path.iterdir()
    assert (project / "README.md").read_text().splitlines()[0] == f"# {name}"
