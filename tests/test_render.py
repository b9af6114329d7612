"""Every combination of answers renders to clean files, without traces of other choices."""

from __future__ import annotations

import json
import os
import py_compile
import re
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import CHOICES, CODE_QUESTIONS, CONTEXT, TEMPLATE, Bake, combinations, name_of, read_tree, run
from cookiecutter.main import cookiecutter

BIN = Path(sys.executable).parent
RECIPES = ("any_model.md", "contrastive.md", "ema.md", "gan.md", "transformers.md")
every_combination = pytest.mark.parametrize("answers", list(combinations()), ids=name_of)

# Words that belong to one answer: a project with another answer must not contain them. The table of answers in
# pyproject.toml is not searched.
TRACES = {
    ("parallelism", "ddp"): r"\bddp\b(?!-template)|DistributedDataParallel|no_sync",
    ("parallelism", "fsdp"): r"fsdp|fully.shard",
    ("parallelism", "model_parallel"): r"model.parallel",
    ("parallelism", "pipeline"): r"pipelin|bubble",
    ("parallelism", "tensor"): r"tensor.parallel|tensor_plan|sequence.parallel|check_shards",
    ("parallelism", "data_parallel"): r"nn\.DataParallel|data_parallel",
    ("task", "digits"): r"\bUCI\b|digits\.(npz|md)|accuracy|pixel|GroupNorm",
    ("task", "language"): r"bits.per.byte|\bgenerate\b|standard library|perplexity|model\.context",
    ("tracker", "tensorboard"): r"tensorboard",
    ("launcher", "spawn"): r"\bspawn(?!\")",  # "spawn" is also the start method of loader processes.
    ("launcher", "torchrun"): r"torchrun|torch\.distributed\.run|standalone",
    ("cluster", "slurm"): r"sbatch|scancel|scontrol",
    ("cluster", "kubernetes"): r"kubernetes|kubectl|kubeflow|\bpods?\b",
    ("docker", True): r"docker|in a container|development container",
}
# model_parallel averages gradients with DDP, and data_parallel explains why DDP is better.
ALLOWED = {("model_parallel", "ddp"), ("data_parallel", "ddp"), ("data_parallel", "model_parallel")}


def texts(project: Path) -> dict[str, str]:
    """Return the text files of a project by name, without the table of answers."""
    contents = {name: data.decode() for name, data in read_tree(project).items() if not name.endswith(".npz")}
    contents["pyproject.toml"] = contents["pyproject.toml"].split("[tool.ddp-template]")[0]
    return contents


def parse(path: Path, scratch: Path) -> None:
    """Parse a file according to its suffix; raise an error if it is invalid."""
    if path.suffix == ".py":
        py_compile.compile(str(path), cfile=str(scratch / "compiled"), doraise=True)
    elif path.suffix in (".yaml", ".yml"):
        list(yaml.safe_load_all(path.read_text()))
    elif path.suffix == ".json":
        json.loads(path.read_text())
    elif path.suffix == ".toml":
        tomllib.loads(path.read_text())
    elif path.suffix == ".xml":
        ElementTree.parse(path)


@every_combination
def test_rendered_files_parse(baked: Bake, answers: dict[str, Any], tmp_path: Path) -> None:
    project = baked(**answers)
    for path in project.rglob("*"):
        parse(path, tmp_path)
        if path.suffix == ".sh":
            assert os.access(path, os.X_OK)
    settings = tomllib.loads((project / "pyproject.toml").read_text())
    recorded = settings["tool"]["ddp-template"]
    assert recorded.pop("version") == CONTEXT["_version"]
    expected = {name: str(value).lower() if isinstance(value, bool) else value for name, value in answers.items()}
    assert recorded == expected


@every_combination
def test_rendered_files_pass_the_linter_and_the_formatter(baked: Bake, answers: dict[str, Any]) -> None:
    project = baked(**answers)
    run(BIN / "ruff", "format", "--check", "--no-cache", ".", cwd=project)
    run(BIN / "ruff", "check", "--no-cache", ".", cwd=project)
    for name, text in texts(project).items():
        assert text.endswith("\n") and not text.endswith("\n\n"), name
        assert not re.search(r"[ \t]+$", text, re.MULTILINE), name
        if not name.endswith((".py", "LICENSE")):
            prose = re.sub(r"^```python\n.*?^```", "code", text, flags=re.MULTILINE | re.DOTALL)
            assert "\n\n\n" not in prose, name


@every_combination
def test_a_project_has_no_traces_of_the_template_or_of_other_choices(baked: Bake, answers: dict[str, Any]) -> None:
    project = baked(**answers)
    for name, text in texts(project).items():
        if not name.startswith(".github"):
            assert not re.search(r"cookiecutter|jinja|\{\{|\}\}|#::|::#|#//|//#", re.sub("Jinja2==.*", "", text)), name
        for (question, value), trace in TRACES.items():
            if answers[question] != value and (answers[question], value) not in ALLOWED:
                if question == "task" and name.startswith("docs/"):
                    continue  # Recipes are about other data.
                if question == "launcher" and name.endswith("environment.py"):
                    continue  # This file reads the variables of every launcher.
                assert not re.search(trace, text, re.IGNORECASE), f"{name} shows {value}"


@pytest.fixture(scope="module")
def checked_sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[bytes]]:
    """The cache directory of mypy, and the sources that it has checked."""
    return tmp_path_factory.mktemp("mypy"), set()


@every_combination
def test_the_code_passes_mypy(baked: Bake, answers: dict[str, Any], checked_sources: tuple[Path, set[bytes]]) -> None:
    cache, checked = checked_sources
    project = baked(**answers)
    sources = {data for name, data in read_tree(project).items() if name.startswith("src")}
    if not sources <= checked:  # Otherwise other projects have covered all of them.
        run(BIN / "mypy", "--cache-dir", cache, cwd=project)
        checked |= sources


def test_every_choice_changes_the_project(baked: Bake) -> None:
    default = {name: values[0] for name, values in CHOICES.items()}
    for name, values in CHOICES.items():
        trees = [texts(baked(**{**default, name: value})) for value in values]
        assert all(one != other for i, one in enumerate(trees) for other in trees[:i]), name


def test_every_template_is_used(baked: Bake) -> None:
    rendered = "\n".join(text for answers in combinations() for text in texts(baked(**answers)).values())
    for path in (TEMPLATE / "templates").rglob("*"):
        if path.is_dir():
            continue
        lines = [
            line for line in path.read_text().splitlines() if len(line) > 30 and not re.search(r"#::|\{\{|//#", line)
        ]
        assert not lines or any(line in rendered for line in lines), path


def test_rendering_depends_only_on_the_answers(bake: Bake, tmp_path: Path) -> None:
    first = bake("first", tracker="tensorboard", docker=True)
    trees = [read_tree(first), read_tree(bake("second", tracker="tensorboard", docker=True))]
    replayed = cookiecutter(str(TEMPLATE), replay=True, output_dir=str(tmp_path / "replayed"))
    trees.append(read_tree(Path(replayed)))
    answers = {"tracker": "tensorboard", "docker": True}
    without_hooks = cookiecutter(
        str(TEMPLATE), no_input=True, extra_context=answers, output_dir=str(tmp_path / "bare"), accept_hooks=False
    )
    trees.append(read_tree(Path(without_hooks)))
    assert all(tree == trees[0] for tree in trees)


def test_scripts_pass_shellcheck(baked: Bake) -> None:
    projects = [baked(launcher=launcher) for launcher in CHOICES["launcher"]]
    projects += [baked(cluster="slurm", parallelism=parallelism) for parallelism in ("ddp", "data_parallel")]
    scripts = [path for project in projects for kind in ("*.sh", "*.sbatch") for path in project.rglob(kind)]
    run(BIN / "shellcheck", *scripts, TEMPLATE / "tests" / "demo.sh", TEMPLATE / ".ci" / "run", cwd=TEMPLATE)


def test_dockerfile_passes_hadolint(baked: Bake) -> None:
    run(BIN / "hadolint", baked(docker=True) / "Dockerfile", cwd=TEMPLATE)


def test_template_sources_parse_before_they_are_rendered(tmp_path: Path) -> None:
    folders = [TEMPLATE / "{{cookiecutter.project_slug}}", TEMPLATE / "templates", TEMPLATE / "hooks"]
    sources = [path for folder in folders for path in folder.rglob("*")]
    assert len(sources) > 40
    for path in sources:
        parse(path, tmp_path)


@pytest.mark.parametrize("task", CHOICES["task"])
def test_strategies_differ_only_in_the_expected_files(baked: Bake, task: str) -> None:
    trees = [read_tree(baked(parallelism=value, task=task)) for value in CHOICES["parallelism"]]
    for tree in trees[1:]:
        different = {Path(name).name for name in tree.keys() ^ trees[0].keys()}
        different |= {Path(name).name for name in tree.keys() & trees[0].keys() if tree[name] != trees[0][name]}
        assert different >= {"README.md", "parallel.py", "config.py", "preflight.py", "pyproject.toml"}
        # Some strategies also differ in settings for micro-batches, the sharding of a block, pipeline stages, the
        # bubble and its benchmark, the splits that the tests compare, and the number of processes that editors and
        # scripts start.
        assert different <= {
            *("README.md", "parallel.py", "config.py", "preflight.py", "pyproject.toml", "default.yaml", "model.py"),
            *("stages.py", "bubble.py", "benchmark.py", "one_gpu.yaml", "eight_gpus.yaml", "Makefile", "support.py"),
            *("launch.json", "train_on_two_ranks.run.xml", "launch.sh", "multinode.sh"),
            # What a split between blocks needs, and what recipes say about the strategy.
            *("sequence.py", "__init__.py", *RECIPES),
        }


def test_the_other_questions_change_only_separate_files(baked: Bake) -> None:
    own_files = {
        "cluster": {
            *("README.md", ".gitignore", "scripts/train.sbatch"),
            *("scripts/volume.yaml", "scripts/job.yaml", "scripts/trainjob.yaml"),
        },
        "docker": {"README.md", "Dockerfile", ".dockerignore", ".devcontainer.json"},
        "license": {"LICENSE"},
    }
    assert own_files.keys() == CHOICES.keys() - set(CODE_QUESTIONS)
    default = read_tree(baked())
    for name, files in own_files.items():
        for value in CHOICES[name]:
            tree = read_tree(baked(**{name: value}))
            different = {path for path in tree.keys() | default.keys() if tree.get(path) != default.get(path)}
            assert different <= files | {"pyproject.toml"}, value  # pyproject.toml has the table of answers.
