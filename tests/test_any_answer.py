"""Arbitrary text as an answer: rejected with a command that works, or rendered to exactly this text."""

from __future__ import annotations

import re
import shlex
import tempfile
from pathlib import Path
from typing import Any

import pytest
from answers import answers_of, ask, check_project, derive, only_project, retry
from conftest import CONTEXT
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

import check_answers

# The same examples in every run.
settings.register_profile("answers", derandomize=True, database=None, deadline=None)
PROPERTY = settings.get_profile("answers")

# What breaks shells, make, TOML, JSON, YAML, Markdown, Jinja or a terminal, and what only looks as if it could.
WORDS = r"""
" ' \\ $ ` % { } {{ }} {% %} #:: ::# #// //# # - -- --- = : / .. ../x /etc/x a/../../b ~ * ? & ; | < > ! [ ] , @
$HOME $(id) ${x} %s &amp; &#39; \n \x41 <b> *.py torch Test json class 2024 3d x_y __init__
🔥 שלום 東京 Über
"""
TRICKY = [
    *WORDS.split(),
    *(" ", "\t", "\n", "\r\n", "\0", "\a", "\x1b[31m", "\x7f", "\x85", "\u2028", "\u2029"),
    *("\xa0", "\u3000", "\u200b", "\u200c", "\u200d", "\u200f", "\u202e", "\u2066", "\ufeff", "\ufffe", "\ud800"),
    *("\U0001f469\u200d\U0001f4bb", "\u0645\u06cc\u200c\u062e", "x" * 500),  # An emoji with a joiner, letters without.
]
ANY_TEXT = st.lists(st.text(max_size=8) | st.sampled_from(TRICKY), max_size=5).map("".join)
RESERVED = [name for names in CONTEXT["_reserved"].values() for name in names]
ANY_SLUG = st.from_regex(r"[A-Za-z][a-z0-9]{0,40}([-_][a-z0-9]{1,40}){0,2}", fullmatch=True) | ANY_TEXT


@pytest.fixture(scope="module")
def defaults() -> dict[str, Any]:
    return derive()


@settings(PROPERTY, max_examples=500)
@given(name=ANY_TEXT, author=ANY_TEXT, slug=ANY_SLUG | st.sampled_from(RESERVED))
def test_a_rejected_answer_comes_with_a_command_that_works(
    defaults: dict[str, Any], name: str, author: str, slug: str
) -> None:
    answers = defaults | {"project_name": name, "author": author, "project_slug": slug}
    fault = check_answers.find_fault(answers)
    better = answers_of(check_answers.command(answers, ["cookiecutter", "gh:org/ddp-template"]))
    assert check_answers.find_fault(answers | better) is None
    kept = {question for question in better if better[question] == str(answers[question])}
    if fault is None:
        assert kept == better.keys()
    else:
        assert fault[0] not in kept
        assert kept >= better.keys() - {"project_name", "author", "project_slug"}


def test_the_command_is_the_one_that_was_given_with_other_answers(defaults: dict[str, Any]) -> None:
    answers = defaults | {"project_slug": "torch"}
    words = ["/bin/cookiecutter", "gh:a/fork", "--checkout", "v1", "project_slug=torch", "--output-dir", "my projects"]
    expected = ["cookiecutter", "gh:a/fork", "--checkout", "v1", "--output-dir", "my projects", "--no-input"]
    command = shlex.split(check_answers.command(answers, words))
    assert command[: len(expected)] == expected and "project_slug=my-torch" in command
    assert check_answers.command(answers, ["/bin/cruft", "create", "gh:a/fork"]) == "project_slug=my-torch"


@settings(PROPERTY, max_examples=80)
@given(name=ANY_TEXT | st.sampled_from(RESERVED))
@example("&#99999999999999999999;")
@example("x" * 500)
def test_the_default_slug_of_any_name_works(defaults: dict[str, Any], name: str) -> None:
    assume(check_answers.find_fault(defaults | {"project_name": name}) is None)
    answers = derive(project_name=name)  # Otherwise it would exit.
    assert answers["project_slug"] == answers["__default_slug"]


@settings(PROPERTY, max_examples=80)
@given(slug=ANY_SLUG)
def test_a_slug_is_rejected_or_the_name_of_a_folder(defaults: dict[str, Any], slug: str) -> None:
    if check_answers.find_fault(defaults | {"project_slug": slug}) is None:
        answers = derive(project_slug=slug)
        assert answers["project_slug"] == slug.strip()
        assert re.fullmatch(r"[A-Za-z0-9_-]+", slug.strip()) and len(slug.strip()) <= CONTEXT["_slug_limit"]
    else:
        with pytest.raises(SystemExit, match=r"^error: project_slug is "):
            derive(project_slug=slug)


def fits_a_command(text: str) -> bool:
    """Return whether text can be a word of a command line."""
    return "\0" not in text and not re.search("[\ud800-\udfff]", text)


ANSWERS = st.fixed_dictionaries(
    {
        "project_name": ANY_TEXT.filter(fits_a_command),
        "author": ANY_TEXT.filter(fits_a_command),
        "project_slug": ANY_SLUG.filter(fits_a_command),
        "description": ANY_TEXT.filter(fits_a_command),
    }
)


@settings(PROPERTY, max_examples=20, suppress_health_check=list(HealthCheck))
@given(answers=ANSWERS)
def test_any_text_is_rejected_or_rendered_as_it_is(isolated: None, answers: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        result = ask(Path(folder), **answers, docker="true", cluster="kubernetes")
        if result.returncode == 0:
            project = only_project(Path(folder))
        else:
            project = retry(Path(folder), result)
            answers = answers | answers_of(result.stderr.splitlines()[1])
        check_project(
            project, *(answers[name].strip() for name in ("project_name", "author", "project_slug", "description"))
        )
