"""CONTRIBUTING's "How to add a choice": its steps, followed for a made-up choice of each question, give a project."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import CHOICES, TEMPLATE, copy_tracked, read_tree, run
from cookiecutter.main import cookiecutter

BIN = Path(sys.executable).parent
# For each question, the choice that the made-up one is a copy of.
ORIGINALS = {
    "parallelism": "ddp",
    "task": "digits",
    "launcher": "torchrun",
    "cluster": "slurm",
    "tracker": "tensorboard",
    "license": "MIT",
}


def documented_files() -> dict[str, tuple[set[str], set[str]]]:
    """The files of a choice, and its optional ones, as the table says them."""
    rows = re.findall(r"^   \| `(\w+)` \| (.*?) \| (.*?)\|$", (TEMPLATE / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    name = re.compile(r"`([\w.]*(?:\.\w+)|LICENSE)`")
    return {question: (set(name.findall(files)), set(name.findall(optional))) for question, files, optional in rows}


FILES = documented_files()


def test_the_table_is_complete() -> None:
    assert FILES.keys() == ORIGINALS.keys() == {name for name in CHOICES if CHOICES[name] != [False, True]}
    for question, (files, optional) in FILES.items():
        assert files
        for choice in CHOICES[question]:
            folder = TEMPLATE / "templates" / question / choice
            there = {path.name for path in folder.iterdir()} if folder.exists() else set()
            assert there >= files or choice == "none", folder
            # Step 3: a file of its own, which a file with a private name includes.
            for extra in there - files - optional:
                tree = (TEMPLATE / "{{cookiecutter.project_slug}}").rglob("*")
                includes = f'include "{question}/{choice}/{extra}"'
                private = f"'{question}/{choice}'"
                assert private in (TEMPLATE / "cookiecutter.json").read_text() or any(
                    "{{cookiecutter.__" in path.name and includes in path.read_text()
                    for path in tree
                    if path.is_file() and path.suffix != ".npz" and "npz" not in path.name
                ), extra


def add_choice(template: Path, question: str, choice: str, original: str) -> None:
    """Steps 1 and 2: a folder with the documented files, the value and its label."""
    files, optional = FILES[question]
    source, target = (template / "templates" / question / name for name in (original, choice))
    target.mkdir()
    for name in files | optional:
        if (source / name).exists():
            text = (source / name).read_text()
            # A tracker's packages are installed by its name.
            (target / name).write_text(text.replace(f"{original} =", f"{choice} =") if name == "extra.toml" else text)
    context: dict[str, Any] = json.loads((template / "cookiecutter.json").read_text())
    context[question].append(choice)
    context["__prompts__"][question][choice] = f"{choice}: Use it to see that this works"
    (template / "cookiecutter.json").write_text(json.dumps(context, indent=2))


def add_file(template: Path, question: str, choice: str) -> None:
    """Step 3: one more file in the project, for this choice only."""
    (template / "templates" / question / choice / "submit.sh").write_text("#!/usr/bin/env bash\necho submitted\n")
    tree = template / "{{cookiecutter.project_slug}}" / "scripts"
    (tree / "{{cookiecutter.__submit_sh}}").write_text(f'#:: include "{question}/{choice}/submit.sh" ::#\n')
    text = (template / "cookiecutter.json").read_text()
    value = f"""  "__submit_sh": "{{{{ 'submit.sh' if cookiecutter.{question} == '{choice}' else '' }}}}",\n"""
    assert text.count('  "_version"') == 1
    (template / "cookiecutter.json").write_text(text.replace('  "_version"', f'{value}  "_version"'))


def render(template: Path, output: Path, **answers: str) -> Path:
    return Path(cookiecutter(str(template), no_input=True, extra_context=answers, output_dir=str(output)))


@pytest.mark.parametrize("question", FILES)
def test_a_made_up_choice(question: str, tmp_path: Path) -> None:
    template, choice, original = tmp_path / "template", "made_up", ORIGINALS[question]
    copy_tracked(template)
    add_choice(template, question, choice, original)
    add_file(template, question, choice)
    project = render(template, tmp_path / "ours", **{question: choice})
    assert (project / "scripts" / "submit.sh").read_text().endswith("echo submitted\n")
    run(BIN / "ruff", "check", "--no-cache", ".", cwd=project)
    run(BIN / "ruff", "format", "--check", "--no-cache", ".", cwd=project)
    run(sys.executable, "-m", "my_experiment", "--preflight", "train", cwd=project, PYTHONPATH="src", NPROC="1")

    # What the documented files make is in the project; conditions on the original's name may take other turns.
    theirs = render(template, tmp_path / "theirs", **{question: original})
    ours, others = read_tree(project), read_tree(theirs)
    assert not (theirs / "scripts" / "submit.sh").exists()
    same = [name for name in ours if ours[name] == others.get(name)]
    assert len(same) > 0.8 * len(others)
    shutil.rmtree(template)
