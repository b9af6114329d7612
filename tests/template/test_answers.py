"""Unusual answers are rejected in one line with a command that works, or rendered as they are."""

from __future__ import annotations

import json
import keyword
import os
import re
import sys
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from asking import ask, call, check_project, configure, edit_replay, only_project, recorded, replay, retry
from conftest import BIN, CHOICES, TEMPLATE, Bake, read_tree, run
from cookiecutter.main import cookiecutter
from packaging.utils import canonicalize_name
from renders import PARTS, derive

import check_answers

LIMIT = check_answers.SLUG_LIMIT
RESERVED = json.loads((TEMPLATE / "reserved.json").read_text())
PYTHON = {canonicalize_name(name) for name in sys.stdlib_module_names}
SLUG = "[a-z][a-z0-9]*(-[a-z0-9]+)*"
# Names, each with the slug that is offered for it.
DEFAULT_SLUGS = {
    "My Experiment": "my-experiment",
    "  Über  Netz 2!": "uber-netz-2",
    "東京": "dong-jing",
    "🔥": "my-experiment",
    '"': "my-experiment",
    "2024 Results": "experiment-2024-results",
    "Tests": "my-tests",
    "torch": "my-torch",
    "Typing Extensions": "my-typing-extensions",
    "Class": "my-class",
    "word " * 100: "word-word-word-word-word-word-word-word-word",
}
REJECTED: list[tuple[str, Any, str]] = [
    *[("project_slug", slug, "existing module") for slug in ("Json", "PIL", "Typing_Extensions", "test_split")],
    *[("project_slug", slug, "imports if it is there; a name of your own works") for slug in ("attrs", "attr", "dill")],
    *[("project_slug", slug, "Python") for slug in ("sitecustomize", "distutils", "compression")],
    *[("project_slug", slug, "a device on Windows") for slug in ("con", "NUL", "com1", "lpt9")],
    ("project_slug", "node_modules", "ruff skips"),
    ("project_slug", "class", "keyword"),
    *[("project_slug", slug, "letters and digits") for slug in ("3d-vision", "/etc/x", "..", "x.", "-x", "{{ 1 }}")],
    ("project_slug", "x" * (LIMIT + 1), "longer than"),
    *[(question, "", "empty") for question in ("project_slug", "project_name", "description", "author")],
    ("project_name", "\u3000\u200d\xa0", "empty"),
    *[("project_name", name, "control character") for name in ("two\nlines", "two\u2028lines", "right\u202eleft")],
    ("project_name", os.fsdecode(b"caf\xe9"), "control character"),  # Not UTF-8.
    ("author", "A\x1b[31m", "control character"),
]
# What a file can hold beside texts, and a replay even if cookiecutter would not have taken it.
REJECTED += [
    *[(name, None, "not text") for name in ("project_name", "project_slug", "description", "author")],
    *[("author", answer, "not text") for answer in (True, 5, ["A"], {"a": "b"})],
    *[("docker", answer, "neither true nor false") for answer in (None, {}, 0, "maybe")],
    *[("project_slug", slug, "letters and digits") for slug in ("../evil", "/tmp/evil", "x" * 500 + "/")],
    *[("parallelism", choice, "not one of ddp, fsdp,") for choice in ("nope", "../parallelism/ddp", None, ["ddp"])],
]
# What follows from the answers, as a replay may hold it; and what an older version of the template did not record.
DERIVED = {
    "__package": "../x",
    "__year": "1\n2",
    "_version": "0.1",
    "_repository": "https://evil.example",
    "_copy_without_render": None,
    "_jinja2_env_vars": {},
}
RECORDED = ("__text", "__checked", "_extensions", *DERIVED)
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
    "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",  # Persian, with a non-joiner.
    "\u05e9\u05dc\u05d5\u05dd (right to left)",
    '"""',
    "---",
    "\xa0\u3000 blanks around ",
    "x" * 500,
    "-x",
    "~/../.. con.",
    "null",
    "[no, 1e3]: *a &b",
]
REFUSED = [
    {path.parent.parent.name: path.parent.name, question: choice}
    for path in sorted(PARTS.rglob("facts.json"))
    for question, reasons in json.loads(path.read_text()).get("refuses", {}).items()
    for choice in reasons
]


def test_an_answer_that_cannot_work_has_a_reason_and_a_better_one() -> None:
    answers = derive()
    for question, answer, reason in REJECTED:
        fault = check_answers.find_fault(answers | {question: answer})
        assert fault and fault[0] == question and reason in fault[1], (question, answer, fault)
        assert check_answers.find_fault(answers | {question: fault[2]}) is None, (question, answer, fault)


@pytest.mark.parametrize(
    ("way", "question", "answer"),
    [
        (ask, "project_slug", "Json"),
        (ask, "project_name", "two\nlines"),
        (ask, "author", "A\x1b[31m"),
        (ask, "description", ""),
        (ask, "project_slug", "x" * (LIMIT + 1)),
        (configure, "author", True),
        (configure, "docker", None),
        (replay, "project_slug", "../evil"),
        (replay, "parallelism", ["ddp"]),
        (replay, "docker", "maybe"),
    ],
)
def test_it_is_rejected_in_one_line_with_a_command_that_works(
    way: Callable[..., CompletedProcess[str]], question: str, answer: object, tmp_path: Path
) -> None:
    (folder := tmp_path / "folder").mkdir()
    result = way(folder, launcher="spawn", **{question: answer})
    message = result.stderr.splitlines()[0]
    assert message.startswith(f"error: {question} is ") and len(message) < 300
    assert recorded(retry(folder, result))["launcher"] == "spawn"  # The other answers are kept.


@pytest.mark.parametrize("answers", REFUSED, ids=str)
def test_choices_that_do_not_fit_are_rejected_with_a_command_that_works(
    answers: dict[str, str], tmp_path: Path
) -> None:
    result = ask(tmp_path, **answers)
    owner, refused = answers
    assert result.stderr.startswith(f"error: {refused} is {answers[refused]!r}, which "), result.stderr
    choices = recorded(retry(tmp_path, result))
    assert choices[owner] == answers[owner] and choices[refused] != answers[refused]


@pytest.mark.parametrize("name", ["paralelism", "Task", "__package"])
def test_an_answer_to_no_question_is_rejected_with_a_command_that_works(name: str, tmp_path: Path) -> None:
    result = ask(tmp_path, launcher="spawn", **{name: "../x"})
    assert result.stderr.startswith(f"error: {name} is none of the questions project_name, project_slug, ")
    assert recorded(retry(tmp_path, result))["launcher"] == "spawn"


@pytest.mark.parametrize("version", ["2.1.1", "2.5.0"])
def test_a_cookiecutter_that_is_too_old_is_refused(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2.1 would write half a project. Only the version is that of an old one."""
    metadata = tmp_path / "path" / f"cookiecutter-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: cookiecutter\nVersion: {version}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    (folder := tmp_path / "folder").mkdir()
    result = ask(folder)
    expected = "error: cookiecutter is older than 2.6. Try:\n  pip install --upgrade cookiecutter\n"
    assert (result.returncode, result.stderr) == (1, expected) and not [*folder.iterdir()]


def test_names_may_contain_any_other_character(bake: Bake, tmp_path: Path) -> None:
    for number, name in enumerate(ACCEPTED):
        names = {"project_name": name, "author": name, "description": name}
        check_project(
            bake(str(number), project_slug="own-name", docker=True, **names), project_slug="own-name", **names
        )
    assert not list(tmp_path.rglob("hacked"))
    run(BIN / "ruff", "format", "--check", "--no-cache", ".", cwd=tmp_path)
    run(BIN / "ruff", "check", "--no-cache", ".", cwd=tmp_path)


def test_names_change_no_code(bake: Bake) -> None:
    """Otherwise the code would have to be linted and run with every name."""
    answers = {"project_slug": "own-name", "docker": True, "cluster": "kubernetes"}
    tree = read_tree(bake("default", **answers))
    other = {"project_name": "Other", "author": "Somebody Else", "description": "Something else"}
    named = read_tree(bake("named", **other, **answers))
    different = {name for name in tree.keys() | named.keys() if tree.get(name) != named.get(name)}
    assert different <= {"README.md", "LICENSE", "pyproject.toml", ".devcontainer.json", "src/own_name/__init__.py"}
    assert named["src/own_name/__init__.py"] == b'"""Something else"""\n'


def test_the_default_slug_is_derived_from_the_name() -> None:
    for name, slug in DEFAULT_SLUGS.items():
        assert derive(project_name=name)["project_slug"] == slug


def test_without_hooks_no_slug_leads_out_of_the_output_folder(tmp_path: Path) -> None:
    answers, folder = {"project_slug": "a/../../x"}, str(tmp_path / "out")
    with pytest.raises(SystemExit, match=r"^error: project_slug is .*\n  project_slug="):
        cookiecutter(str(TEMPLATE), no_input=True, extra_context=answers, output_dir=folder, accept_hooks=False)
    assert not list(tmp_path.iterdir())


def test_the_code_passes_ruff_with_the_longest_slug(bake: Bake, tmp_path: Path) -> None:
    for parallelism in CHOICES["parallelism"]:
        for launcher in CHOICES["launcher"]:
            answers = {"parallelism": parallelism, "launcher": launcher, "task": "language", "tracker": "tensorboard"}
            bake(f"{parallelism}-{launcher}", project_slug="x" * LIMIT, **answers)
    run(BIN / "ruff", "format", "--check", "--no-cache", ".", cwd=tmp_path)
    run(BIN / "ruff", "check", "--no-cache", ".", cwd=tmp_path)


def test_rendering_depends_only_on_the_answers(bake: Bake, tmp_path: Path) -> None:
    """Through a replay, and with hooks off."""
    answers = {"tracker": "tensorboard", "docker": True}
    first = read_tree(bake("first", **answers))
    folders = [str(tmp_path / name) for name in ("replayed", "bare")]
    replayed = cookiecutter(str(TEMPLATE), replay=True, output_dir=folders[0])
    words = {"no_input": True, "extra_context": answers, "accept_hooks": False}
    bare = cookiecutter(str(TEMPLATE), output_dir=folders[1], **words)
    assert first == read_tree(Path(replayed)) == read_tree(Path(bare))


@pytest.mark.parametrize(("changes", "without"), [(DERIVED, ()), ({}, RECORDED)], ids=["edited", "missing"])
def test_what_follows_from_the_answers_is_derived_again_by_a_replay(
    changes: dict[str, object], without: Iterable[str], bake: Bake, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    result = call(folder, "--replay-file", str(edit_replay(folder, {"author": "{{ 1 }}", **changes}, without)))
    assert result.returncode == 0, result.stderr
    assert read_tree(only_project(folder)) == read_tree(bake(author="{{ 1 }}"))


def test_no_slug_is_the_name_of_a_module_and_the_better_one_works() -> None:
    answers = derive()
    for name in filter(re.compile(SLUG).fullmatch, [*chain(*RESERVED.values()), *PYTHON, *keyword.kwlist]):
        fault = check_answers.find_fault(answers | {"project_slug": name})
        assert fault and check_answers.find_fault(answers | {"project_slug": fault[2]}) is None, name
