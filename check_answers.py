"""Reject answers that cannot work before anything is written, and print the reason and a command that works.

cookiecutter and cruft load this Jinja extension because cookiecutter.json names it, with hooks or without. Its checks
depend only on the answers and on cookiecutter.json, so that a project renders the same everywhere.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import unicodedata
from pathlib import Path

from jinja2.ext import Extension

# The answers that are text, each with one that works.
EXAMPLES = {
    "project_name": "My Experiment",
    "project_slug": "my-experiment",
    "description": "Distributed training in plain PyTorch",
    "author": "Your Name",
}
# These change the order in which the text around a name is displayed.
BIDI_CONTROLS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
NONCHARACTERS = "\ufffe\uffff"  # No YAML file may contain them.


class CheckAnswers(Extension):
    """Adds what cookiecutter.json calls: `keep_answers` before the questions, `check_answers` after them."""

    def __init__(self, environment):
        super().__init__(environment)
        sys.modules.pop(__name__, None)  # cruft renders two versions of the template in one process.
        environment.globals["keep_answers"] = self.keep_answers
        environment.globals["check_answers"] = self.check_answers
        self.templates = None

    def keep_answers(self):
        """From now on, evaluate only what cookiecutter.json computes: an answer is text, not a Jinja template."""
        context = json.loads(Path(__file__).with_name("cookiecutter.json").read_text(encoding="utf-8"))
        computed = {value for name, value in context.items() if name.startswith("__") and name != "__prompts__"}
        self.templates = computed | {context["project_slug"]}
        return ""

    def check_answers(self, answers):
        """Return the answers to change, or exit with 1 and a message if one cannot work."""
        self.templates = None
        fault = find_fault(answers)
        if fault is None:
            return {"project_slug": answers["project_slug"].strip()}
        question, reason, _ = fault
        # Not one of cookiecutter's exceptions: for some of them, its command prints a traceback, and cruft's for all.
        sys.exit(f"error: {question} is {answers[question]!r}, which {reason}. Try:\n  {command(answers, sys.argv)}")

    def preprocess(self, source, name, filename=None):
        """Return ``source``; if it is an answer, a template that renders to it."""
        is_answer = self.templates is not None and source not in self.templates
        return "{{ " + ascii(source) + " }}" if is_answer else source


def find_fault(answers):
    """Return the first answer that cannot work as (question, reason, a better value), or None if all work."""
    for question, example in EXAMPLES.items():
        answer = answers[question]
        if any(map(is_control, answer)):
            printable = "".join(" " if is_control(c) else c for c in answer)
            return question, "contains a control character or a line break", " ".join(printable.split())
        if all(c.isspace() or unicodedata.category(c) == "Cf" for c in answer):
            return question, "is empty", answers["__default_slug"] if question == "project_slug" else example
    return find_slug_fault(answers)


def is_control(character):
    """Return whether a name must not contain this character; joiners and all kinds of spaces are ordinary ones."""
    return unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or character in BIDI_CONTROLS + NONCHARACTERS


def find_slug_fault(answers):
    """Return why the slug cannot be the name of a folder, a distribution and a package, as find_fault does."""
    slug, limit = answers["project_slug"].strip(), answers["_slug_limit"]
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*([-_][A-Za-z0-9]+)*", slug):
        return "project_slug", "is not letters and digits, joined by '-', starting with a letter", suggest(slug, limit)
    if len(slug) > limit:
        return "project_slug", f"is longer than {limit} characters", suggest(slug, limit)
    normalized = slug.lower().replace("_", "-")  # As pip compares names.
    for reason, names in answers["_reserved"].items():
        if normalized in names:
            return "project_slug", reason, f"my-{normalized}"
    return None


def suggest(text, limit):
    """Return a slug of letters and digits that is as close to ``text`` as possible."""
    slug = "-".join(re.findall(r"[a-z0-9]+", text.lower())) or EXAMPLES["project_slug"]
    return (slug if slug[0].isalpha() else f"experiment-{slug}")[:limit].rstrip("-")


def command(answers, words):
    """Return the command ``words`` that renders the same project, with every answer that cannot work replaced.

    If cookiecutter was called by another program, such as cruft, return only these answers.
    """
    better = dict(answers)
    while (fault := find_fault(better)) is not None:
        better[fault[0]] = fault[2]
    questions = [name for name in answers if not name.startswith("_")]
    program = Path(words[0])
    if "cookiecutter" not in (program.stem, program.parent.name):  # The second one is for `python -m cookiecutter`.
        return shlex.join(f"{name}={better[name]}" for name in questions if better[name] != answers[name])
    options = [word for word in words[1:] if word.partition("=")[0] not in questions and word != "--no-input"]
    return shlex.join(["cookiecutter", *options, "--no-input", *(f"{name}={better[name]}" for name in questions)])
