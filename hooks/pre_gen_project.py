"""Reject answers that cannot work before any file is written, and print the reason and a command that works.

The checks depend only on the answers and on cookiecutter.json, so that a project renders the same everywhere.
"""

import json
import re
import shlex
import sys
import unicodedata

ANSWERS = json.loads(r"""{{ cookiecutter | tojson }}""")
# The answers as they were given, before cookiecutter evaluated them as Jinja templates; cruft does not provide them.
GIVEN = json.loads(r"""{{ _cookiecutter | default({}) | tojson }}""")
EXAMPLES = {"project_name": "My Experiment", "author": "Your Name", "project_slug": "my-experiment"}
LIMIT = ANSWERS["_slug_limit"]
# These change the order in which the text around a name is displayed.
BIDI_CONTROLS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
# What starts a Jinja expression, block or comment: cookiecutter and cruft evaluate answers that they are given.
JINJA = ["{" * 2, *(ANSWERS["_jinja2_env_vars"][f"{kind}_start_string"] for kind in ("block", "comment"))]


def original_answers():
    """Return the answers before the template changed them, or cookiecutter evaluated what they contain."""
    answers = ANSWERS | {"project_slug": ANSWERS["__given_slug"]}
    for question in EXAMPLES:
        given = str(GIVEN.get(question, ""))
        is_default = question == "project_slug" and answers[question] == ANSWERS["__default_slug"]
        if any(start in given for start in JINJA) and not is_default:
            answers[question] = given
    return answers


def find_fault(answers):
    """Return the first answer that cannot work as (question, reason, a better value), or None if all work."""
    for question, example in EXAMPLES.items():
        answer = answers[question]
        if any(map(is_control, answer)):
            printable = "".join(" " if is_control(c) else c for c in answer)
            return question, "contains a control character or a line break", " ".join(printable.split())
        for start in JINJA:
            if start in answer:
                apart = answer.replace(start, f"{start[0]} {start[1:]}")
                return question, f"contains {start!r}, which cookiecutter would evaluate", apart
        if all(c.isspace() or unicodedata.category(c) == "Cf" for c in answer):
            return question, "is empty", suggest(answers["project_name"]) if question == "project_slug" else example
    return find_slug_fault(answers["project_slug"].strip())


def is_control(character):
    """Return whether a name must not contain this character; joiners and all kinds of spaces are ordinary ones."""
    return unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or character in BIDI_CONTROLS


def find_slug_fault(slug):
    """Return why a slug cannot be the name of a folder, a distribution and a package, as find_fault does."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*([-_][A-Za-z0-9]+)*", slug):
        return "project_slug", "is not letters and digits, joined by '-', starting with a letter", suggest(slug)
    if len(slug) > LIMIT:
        return "project_slug", f"is longer than {LIMIT} characters", suggest(slug)
    normalized = slug.lower().replace("_", "-")  # As pip compares names.
    for reason, names in ANSWERS["_reserved"].items():
        if normalized in names:
            return "project_slug", reason, f"my-{normalized}"
    return None


def suggest(text):
    """Return a slug of letters and digits that is as close to ``text`` as possible."""
    slug = "-".join(re.findall(r"[a-z0-9]+", text.lower())) or EXAMPLES["project_slug"]
    return (slug if slug[0].isalpha() else f"experiment-{slug}")[:LIMIT].rstrip("-")


def command(answers):
    """Return the command that renders the same project, with every answer that cannot work replaced."""
    answers = dict(answers)
    while (fault := find_fault(answers)) is not None:
        answers[fault[0]] = fault[2]
    words = ["cookiecutter", answers.get("_template") or "gh:org/ddp-template"]
    if answers.get("_checkout"):
        words += ["--checkout", answers["_checkout"]]
    if answers.get("_output_dir"):
        words += ["--output-dir", answers["_output_dir"]]
    questions = [name for name in answers if not name.startswith("_")]
    return shlex.join([*words, "--no-input", *(f"{name}={answers[name]}" for name in questions)])


def main():
    """Exit with 1 if an answer cannot work; cookiecutter then removes what it generated."""
    answers = original_answers()
    fault = find_fault(answers)
    if fault is not None:
        question, reason, _ = fault
        print(f"error: {question} is {answers[question]!r}, which {reason}. Try:", file=sys.stderr)
        print(f"  {command(answers)}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
