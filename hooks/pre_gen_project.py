"""Reject answers that cannot work before any file is written, and print the reason and a command that works.

The checks depend only on the answers, so that a project renders the same everywhere.
"""

import json
import keyword
import re
import shlex
import sys

ANSWERS = json.loads(r"""{{ cookiecutter | tojson }}""")
QUESTIONS = [
    "project_name",
    "project_slug",
    "author",
    "parallelism",
    "task",
    "launcher",
    "cluster",
    "tracker",
    "docker",
    "license",
]
# Import names that a project needs, in addition to those of the standard library: a package with one of these names
# would shadow the module, or be shadowed by it.
TAKEN = {
    "cookiecutter",
    "docstring_parser",
    "jinja2",
    "jsonargparse",
    "matplotlib",
    "mlflow",
    "mypy",
    "numpy",
    "pip",
    "pre_commit",
    "pytest",
    "ruff",
    "setuptools",
    "sympy",
    "tensorboard",
    "torch",
    "torchrun",
    "torchvision",
    "tqdm",
    "typing_extensions",
    "wandb",
    "yaml",
    # The first is in the standard library, but not among its public names; the others are folders of the project.
    "test",
    "tests",
    "src",
    "runs",
    "scripts",
    "configs",
}


def find_fault(answers):
    """Return the first answer that cannot work as (question, reason, a value that works), or None if all work."""
    for question, example in (("project_name", "My Experiment"), ("author", "Your Name"), ("project_slug", "")):
        answer = answers[question]
        if not answer.strip():
            return question, "is empty", example or suggest(answers["project_name"])
        if not answer.isprintable():
            clean = " ".join("".join(c if c.isprintable() else " " for c in answer).split())
            return question, "contains a control character or a line break", clean or example
    slug = answers["project_slug"]
    package = slug.replace("-", "_")
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*([-_][A-Za-z0-9]+)*", slug):
        return "project_slug", "is not letters and digits, joined by '-', starting with a letter", suggest(slug)
    if keyword.iskeyword(package) or keyword.issoftkeyword(package):
        return "project_slug", "is a Python keyword", f"my-{slug}"
    if package.lower() in TAKEN or package.lower() in sys.stdlib_module_names:
        return "project_slug", "is the name of an existing module, which it would shadow", f"my-{slug.lower()}"
    return None


def suggest(text):
    """Return a valid slug that is as close to ``text`` as possible."""
    slug = "-".join(re.findall(r"[a-z0-9]+", text.lower())) or "my-experiment"
    return slug if slug[0].isalpha() else f"experiment-{slug}"


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
    return shlex.join([*words, "--no-input", *(f"{name}={answers[name]}" for name in QUESTIONS)])


def main():
    """Exit with 1 if an answer cannot work; cookiecutter then removes what it generated."""
    fault = find_fault(ANSWERS)
    if fault is not None:
        question, reason, _ = fault
        print(f"error: {question} is {ANSWERS[question]!r}, which {reason}. Try:", file=sys.stderr)
        print(f"  {command(ANSWERS)}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
