"""Checks the answers, offers a slug, and gives templates the files and facts of the chosen folders.

cookiecutter and cruft load this Jinja extension because cookiecutter.json names it, with hooks or without. It rejects
an answer that cannot work before anything is written, with the reason and a command that works: once all questions are
answered, and again when the project's folder gets its name, because a replay asks no questions.
"""

from __future__ import annotations

import functools
import itertools
import json
import keyword
import re
import shlex
import sys
import time
import unicodedata
from importlib.metadata import version
from pathlib import Path

from cookiecutter.cli import main as cli
from jinja2 import pass_context
from jinja2.ext import Extension
from slugify import slugify

HERE = Path(__file__).parent
FOLDER = "{{cookiecutter.project_slug}}"  # The first template that is rendered when a project is written.
EXAMPLE, SLUG_LIMIT = "my-experiment", 60
# These change the order in which the text around a name is displayed.
BIDI_CONTROLS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
NONCHARACTERS = "\ufffe\uffff"  # No YAML file may contain them.


class CheckAnswers(Extension):
    """Adds what cookiecutter.json and the templates call."""

    def __init__(self, environment):
        super().__init__(environment)
        if [*map(int, version("cookiecutter").split(".")[:2])] < [2, 6]:  # 2.1 leaves half a project.
            sys.exit("error: cookiecutter is older than 2.6. Try:\n  pip install --upgrade cookiecutter")
        vars(environment).update(read_json("cookiecutter.json")["_jinja2_env_vars"])  # A replay may have others.
        sys.modules.pop(__name__, None)  # cruft renders two versions of the template in one process.
        functions = {"keep_answers": self.keep_answers, "check_answers": self.check_answers}
        environment.globals.update(functions, default_slug=default_slug, fact=fact, file=file)
        environment.filters["quoted"] = quoted
        self.templates = None

    def keep_answers(self):
        """From now on, evaluate only what cookiecutter.json computes: an answer is text, not a Jinja template."""
        context = read_json("cookiecutter.json")
        computed = {value for name, value in context.items() if name.startswith("__") and name != "__prompts__"}
        self.templates = computed | {context["project_slug"]}
        return ""

    def check_answers(self, answers):
        """Add what follows from the answers, and return ""; or exit with 1 and a message if one cannot work."""
        self.templates = None
        if not questions().keys() <= answers.keys():
            return ""  # A mapping comes last; what a replay lacks comes alone. The folder's name is checked next.
        unknown = [name for name in given(sys.argv) if name not in read_json("cookiecutter.json")]
        if unknown:  # cookiecutter ignores them.
            known = ", ".join(questions())
            sys.exit(f"error: {unknown[0]} is none of the questions {known}. Try:\n  {command(answers, sys.argv)}")
        fault = find_fault(answers)
        if fault is None:
            answers.update(derive(answers))
            return ""
        question, reason, _ = fault
        text = repr(answers[question])
        text = text if len(text) <= 120 else f"{text[:100]}..."
        # Not one of cookiecutter's exceptions: for some of them, its command prints a traceback, and cruft's for all.
        sys.exit(f"error: {question} is {text}, which {reason}. Try:\n  {command(answers, sys.argv)}")

    def preprocess(self, source, name, filename=None):
        """Return ``source``; if it is an answer, a template that renders to it."""
        if self.templates is not None and source not in self.templates:
            return "{{ " + ascii(source) + " }}"
        return "{{ check_answers(cookiecutter) }}" + source if source == FOLDER else source


@pass_context
def fact(context, name):
    """Return what follows from the answers: ``name`` in the facts.json of a choice's folder; "" if none states it."""
    return next((facts[name] for facts in read_facts(context["cookiecutter"]) if name in facts), "")


@pass_context
def file(context, question, name):
    """Return ``name`` if the folder of the chosen answer has this file, or "": the name of an optional file."""
    return name if (HERE / "templates" / question / str(context["cookiecutter"][question]) / name).exists() else ""


def questions():
    """Return the questions, each with its default, or its choices."""
    return {name: value for name, value in read_json("cookiecutter.json").items() if not name.startswith("_")}


def derive(answers):
    """Return what follows from answers: a replay may hold it as it was, or as somebody has edited it."""
    slug = answers["project_slug"].strip()
    own = {name: value for name, value in read_json("cookiecutter.json").items() if re.match("_[^_]", name)}
    own |= {name: is_true(answers[name]) for name, value in questions().items() if isinstance(value, bool)}
    return own | {"project_slug": slug, "__package": slug.replace("-", "_"), "__year": str(time.gmtime().tm_year)}


def is_true(answer):
    """Return whether an answer means yes, or None if it is neither yes nor no; cookiecutter may pass on a text."""
    return {"true": True, "false": False}.get(str(answer).lower())


def read_facts(answers):
    """Yield the facts that each choice states."""
    for question, values in questions().items():
        if isinstance(values, list):
            yield read_json(f"templates/{question}/{answers[question]}/facts.json")


@functools.cache
def read_json(path):
    """Return the content of a file of the template; empty if there is none."""
    path = HERE / path
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def quoted(text):
    """Return a text as it stands between double quotes, in Python, TOML, YAML and JSON."""
    return text.strip().replace("\\", "\\\\").replace('"', '\\"')


def default_slug(name):
    """Return the slug that is offered for the name of a project."""
    name = name if isinstance(name, str) else EXAMPLE  # That it is not text is reported with the other answers.
    slug = slugify(name, entities=False, decimal=False, hexadecimal=False, max_length=48, word_boundary=True)
    prefix = "my-" if find_owner(slug) else "experiment-" if slug[:1].isdigit() else ""
    return prefix + slug or EXAMPLE


def find_owner(slug):
    """Return why a name in lower case, joined by '-', is reserved, or None."""
    name = slug.replace("-", "_")
    if keyword.iskeyword(name) or name in ("true", "false", "none"):
        return "is a Python keyword"
    if name in {module.lower() for module in sys.stdlib_module_names}:
        return "is the name of an existing module, in Python's standard library"
    return next((reason for reason, names in read_json("reserved.json").items() if slug in names), None)


def find_fault(answers):
    """Return the first answer that cannot work as (question, reason, a better value), or None if all work."""
    for question, default in questions().items():
        answer = answers[question]
        if isinstance(default, list) and answer not in default:
            return question, f"is not one of {', '.join(default)}", default[0]
        if isinstance(default, bool) and is_true(answer) is None:
            return question, "is neither true nor false", default
        if isinstance(default, str) and (fault := find_text_fault(answer)) is not None:
            offer = default_slug(answers["project_name"]) if question == "project_slug" else default
            return question, fault[0], fault[1] or offer
    return find_slug_fault(answers["project_slug"].strip()) or find_refusal(answers)


def find_text_fault(answer):
    """Return why an answer is no text that fits one line and a better text, which is empty if nothing is left of it."""
    if not isinstance(answer, str):
        return "is not text", ""
    if any(map(is_control, answer)):
        printable = "".join(" " if is_control(c) else c for c in answer)
        return "contains a control character or a line break", " ".join(printable.split())
    if all(c.isspace() or unicodedata.category(c) == "Cf" for c in answer):
        return "is empty", ""
    return None


def is_control(character):
    """Return whether a name must not contain this character; joiners and all kinds of spaces are ordinary ones."""
    return unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or character in BIDI_CONTROLS + NONCHARACTERS


def find_slug_fault(slug):
    """Return why a slug cannot be the name of a folder, a distribution and a package, as find_fault does."""
    words = "-".join(re.findall("[a-z0-9]+", slug.lower())) or EXAMPLE  # As pip compares names.
    better = (words if words[0].isalpha() else f"experiment-{words}")[:SLUG_LIMIT].rstrip("-")
    if not re.fullmatch("[A-Za-z][A-Za-z0-9]*([-_][A-Za-z0-9]+)*", slug):
        return "project_slug", "is not letters and digits, joined by '-', starting with a letter", better
    if len(slug) > SLUG_LIMIT:
        return "project_slug", f"is longer than {SLUG_LIMIT} characters", better
    owner = find_owner(words)
    better = f"my-{words}"
    return ("project_slug", f"{owner}; a name of your own works, such as {better}", better) if owner else None


def find_refusal(answers):
    """Return the first choice that another one refuses in its facts.json, as find_fault does.

    It states why, as in {"refuses": {"parallelism": {"pipeline": "leaves the outputs on one rank, ..."}}}.
    """
    refusals = [refusal for facts in read_facts(answers) for refusal in facts.get("refuses", {}).items()]
    for question, reasons in refusals:
        if answers[question] in reasons:
            refused = {choice for name, others in refusals if name == question for choice in others}
            better = next(choice for choice in questions()[question] if choice not in refused)
            return question, reasons[answers[question]], better
    return None


def command(answers, words):
    """Return the command ``words`` that renders the same project, with every answer that cannot work replaced.

    If cookiecutter was called by another program, such as cruft, return only these answers.
    """
    better = dict(answers)
    while (fault := find_fault(better)) is not None:
        better[fault[0]] = fault[2]
    if not is_cookiecutter(words[0]):
        return shlex.join(f"{name}={better[name]}" for name in questions() if better[name] != answers[name])
    files, added = ["--replay-file"], ["--no-input"]
    if any(isinstance(value, str) and isinstance(answers[name], bool) for name, value in questions().items()):
        # If the user's settings have yes or no in place of a text, cookiecutter takes no text.
        files, added = [*files, "--config-file"], ["--default-config", *added]
    dropped = "|".join(["--no-input$", "--replay$", *(f"{name}(=|$)" for name in files)])
    kept = [
        word
        for before, word in itertools.pairwise(words)
        if before not in files and not re.match(dropped, word) and not is_answer(before, word)
    ]
    return shlex.join(["cookiecutter", *kept, *added, *(f"{name}={better[name]}" for name in questions())])


def given(words):
    """Return the names of the answers on cookiecutter's command line."""
    pairs = itertools.pairwise(words) if is_cookiecutter(words[0]) else []
    return [word.partition("=")[0] for before, word in pairs if is_answer(before, word)]


def is_cookiecutter(program):
    """Return whether a program is cookiecutter's command, by that name or as `python -m cookiecutter`."""
    path = Path(program)
    return "cookiecutter" in (path.stem, path.parent.name)


def is_answer(before, word):
    """Return whether a word is NAME=VALUE, and not what belongs to an option before it."""
    options = [name for option in cli.params if not getattr(option, "is_flag", True) for name in option.opts]
    return re.match(r"\w+=", word) is not None and before not in options
