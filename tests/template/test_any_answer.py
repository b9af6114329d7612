"""Any text as an answer is rejected with a command that works, or rendered to exactly this text."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asking import answers_of, ask, check_project, configure, only_project, replay, retry
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from renders import derive

import check_answers

# The same examples in every run.
settings.register_profile("answers", derandomize=True, database=None, deadline=None)
PROPERTY = settings.get_profile("answers")
# What breaks shells, make, TOML, JSON, YAML, Markdown, Jinja or a terminal, and what only looks as if it could.
WORDS = r"""
" ' \\ $ ` % { } {{ }} {% %} #:: ::# #// //# # - -- --- = : / .. ../x /etc/x a/../../b ~ * ? & ; | < > ! [ ] , @
$HOME $(id) ${x} %s &amp; &#39; \n \x41 <b> *.py torch Test json class 2024 3d x_y __init__ 🔥 שלום 東京 Über
"""
TRICKY = [
    *WORDS.split(),
    *(" ", "\t", "\n", "\r\n", "\0", "\a", "\x1b[31m", "\x7f", "\x85", "\u2028", "\u2029"),
    *("\xa0", "\u3000", "\u200b", "\u200c", "\u200d", "\u200f", "\u202e", "\u2066", "\ufeff", "\ufffe", "\ud800"),
    *("\U0001f469\u200d\U0001f4bb", "\u0645\u06cc\u200c\u062e", "x" * 500),  # An emoji with a joiner, letters without.
]
ANY_TEXT = st.lists(st.text(max_size=8) | st.sampled_from(TRICKY), max_size=5).map("".join)
RESERVED = st.sampled_from([name for names in check_answers.read_json("reserved.json").values() for name in names])
ANY_SLUG = st.from_regex(r"[A-Za-z][a-z0-9]{0,40}([-_][a-z0-9]{1,40}){0,2}", fullmatch=True) | ANY_TEXT | RESERVED
QUESTIONS = ("project_name", "author", "project_slug", "description")


@pytest.fixture(scope="module")
def defaults() -> dict[str, Any]:
    return derive()


@settings(PROPERTY, max_examples=500)
@given(name=ANY_TEXT, author=ANY_TEXT, slug=ANY_SLUG)
def test_a_rejected_answer_comes_with_a_command_that_works(
    defaults: dict[str, Any], name: str, author: str, slug: str
) -> None:
    answers = defaults | {"project_name": name, "author": author, "project_slug": slug}
    fault = check_answers.find_fault(answers)
    better = answers_of(check_answers.command(answers, ["cookiecutter", "gh:org/ddp-template"]))
    assert check_answers.find_fault(answers | better) is None
    kept = {question for question in better if better[question] == str(answers[question])}
    assert kept >= better.keys() - {"project_name", "author", "project_slug"}
    assert kept == better.keys() if fault is None else fault[0] not in kept


def test_the_command_is_the_one_that_was_given_with_other_answers(defaults: dict[str, Any]) -> None:
    answers = defaults | {"project_slug": "torch"}
    words = ["/bin/cookiecutter", "gh:a/fork", "--checkout", "v1", "project_slug=torch", "--output-dir", "task=x y"]
    expected = ["cookiecutter", "gh:a/fork", "--checkout", "v1", "--output-dir", "task=x y", "--no-input"]
    command = shlex.split(check_answers.command(answers, words))
    assert command[: len(expected)] == expected and "project_slug=my-torch" in command
    assert check_answers.command(answers, ["/bin/cruft", "create", "gh:a/fork"]) == "project_slug=my-torch"


@pytest.mark.parametrize("record", [["--replay"], ["--replay-file", "a.json"], ["--replay-file=a.json"]], ids=str)
def test_the_command_replays_nothing(defaults: dict[str, Any], record: list[str]) -> None:
    """cookiecutter takes no answers in addition; the name of a folder may be that of a question."""
    words = ["cookiecutter", "gh:a/fork", *record, "-o", "task"]
    command = shlex.split(check_answers.command(defaults | {"project_slug": "../x"}, words))
    assert command[:5] == ["cookiecutter", "gh:a/fork", "-o", "task", "--no-input"] and "project_slug=x" in command


@settings(PROPERTY, max_examples=80)
@given(name=ANY_TEXT | RESERVED)
@example("&#99999999999999999999;")
@example("x" * 500)
def test_the_default_slug_of_any_name_works(defaults: dict[str, Any], name: str) -> None:
    assume(check_answers.find_fault(defaults | {"project_name": name}) is None)
    assert derive(project_name=name)["project_slug"] == check_answers.default_slug(name)


@settings(PROPERTY, max_examples=80)
@given(slug=ANY_SLUG)
@example("a/../../b")
@example("-x")
@example("x" * 300)
@example("$(reboot)")
@example("  my_Slug2\xa0")
def test_a_slug_is_rejected_or_the_name_of_a_folder(defaults: dict[str, Any], slug: str) -> None:
    if check_answers.find_fault(defaults | {"project_slug": slug}) is None:
        assert derive(project_slug=slug)["project_slug"] == slug.strip()
        assert re.fullmatch(r"[A-Za-z0-9_-]+", slug.strip()) and len(slug.strip()) <= check_answers.SLUG_LIMIT
    else:
        with pytest.raises(SystemExit, match=r"^error: project_slug is "):
            derive(project_slug=slug)


def fits_a_command(text: str) -> bool:
    """Return whether text can be a word of a command line."""
    return "\0" not in text and not re.search("[\ud800-\udfff]", text)


@pytest.mark.parametrize("way", [ask, configure, replay])
@settings(PROPERTY, max_examples=6, suppress_health_check=list(HealthCheck))
@given(texts=st.tuples(*[ANY_SLUG if "slug" in name else ANY_TEXT for name in QUESTIONS]))
def test_any_text_is_rejected_or_rendered_as_it_is(way: Callable[..., Any], texts: tuple[str, ...]) -> None:
    assume(way is not ask or all(map(fits_a_command, texts)))
    answers = dict(zip(QUESTIONS, texts, strict=True))
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "folder")
        folder.mkdir()
        result = way(folder, **answers, docker=True, cluster="kubernetes")
        if result.returncode == 0:
            project = only_project(folder)
        else:
            project = retry(folder, result)
            better = answers_of(result.stderr.splitlines()[1])
            answers = {name: better[name] for name in QUESTIONS}
        check_project(project, **answers)
