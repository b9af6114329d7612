"""Arbitrary text as an answer: rejected with a command that works, or rendered to exactly this text."""

from __future__ import annotations

import re
import shlex
import tempfile
from pathlib import Path
from typing import Any

import pytest
from answers import answers_of, ask, check_project, derive, load_hook, only_project, retry
from conftest import CONTEXT
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

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


def is_jinja(text: str) -> bool:
    """Return whether cookiecutter would evaluate this text, and perhaps fail, before any hook runs."""
    return any(start in text for start in ("{{", "#::", "#//"))


@pytest.fixture(scope="module")
def hook() -> dict[str, Any]:
    return load_hook()


@settings(PROPERTY, max_examples=500)
@given(name=ANY_TEXT, author=ANY_TEXT, slug=ANY_SLUG | st.sampled_from(RESERVED))
def test_a_rejected_answer_comes_with_a_command_that_works(
    hook: dict[str, Any], name: str, author: str, slug: str
) -> None:
    answers = hook["ANSWERS"] | {"project_name": name, "author": author, "project_slug": slug}
    fault = hook["find_fault"](answers)
    better = answers_of(hook["command"](answers))
    assert hook["find_fault"](answers | better) is None
    assert not any(is_jinja(answer) for answer in better.values())
    kept = {question for question in better if better[question] == str(answers[question])}
    if fault is None:
        assert kept == better.keys()
    else:
        assert fault[0] not in kept
        assert kept >= better.keys() - {"project_name", "author", "project_slug"}


def test_the_command_renders_the_same_version_of_the_template_to_the_same_folder(hook: dict[str, Any]) -> None:
    places = {"_template": "gh:someone/fork", "_checkout": "v1", "_output_dir": "my projects"}
    words = shlex.split(hook["command"](hook["ANSWERS"] | places))
    expected = ["gh:someone/fork", "--checkout", "v1", "--output-dir", "my projects", "--no-input"]
    assert words[: len(expected) + 1] == ["cookiecutter", *expected]


@settings(PROPERTY, max_examples=80)
@given(name=ANY_TEXT.filter(lambda text: not is_jinja(text)) | st.sampled_from(RESERVED))
@example("&#99999999999999999999;")
@example("x" * 500)
def test_the_default_slug_of_any_name_works(hook: dict[str, Any], name: str) -> None:
    answers = derive(project_name=name)["cookiecutter"]
    assert hook["find_slug_fault"](answers["__given_slug"]) is None


@settings(PROPERTY, max_examples=80)
@given(slug=ANY_SLUG.filter(lambda text: not is_jinja(text)))
def test_no_slug_leads_out_of_the_output_folder(hook: dict[str, Any], slug: str) -> None:
    answers = derive(project_slug=slug)["cookiecutter"]
    for name in (answers["project_slug"], answers["__package"]):
        assert re.fullmatch(r"[A-Za-z0-9_-]+", name) and len(name) <= CONTEXT["_slug_limit"]
    if hook["find_fault"](answers | {"project_slug": slug}) is None:
        assert answers["project_slug"] == slug.strip()


def fits_a_command(text: str) -> bool:
    """Return whether text can be a word of a command line that cookiecutter does not evaluate."""
    return not is_jinja(text) and "\0" not in text and not re.search("[\ud800-\udfff]", text)


@settings(PROPERTY, max_examples=20, suppress_health_check=list(HealthCheck))
@given(
    name=ANY_TEXT.filter(fits_a_command), author=ANY_TEXT.filter(fits_a_command), slug=ANY_SLUG.filter(fits_a_command)
)
def test_any_text_is_rejected_or_rendered_as_it_is(isolated: None, name: str, author: str, slug: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        answers = {"project_name": name, "author": author, "project_slug": slug}
        result = ask(Path(folder), **answers, docker="true", cluster="kubernetes")
        if result.returncode == 0:
            project = only_project(Path(folder))
        else:
            project = retry(Path(folder), result)
            answers |= answers_of(result.stderr.splitlines()[1])
        check_project(project, *(answers[question].strip() for question in ("project_name", "author", "project_slug")))
