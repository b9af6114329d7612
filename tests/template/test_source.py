"""The template's own source: it parses and lints before it is rendered, and no fact is stated or used in vain."""

from __future__ import annotations

import ast
import json
import re
import signal
from pathlib import Path

import bump
import pytest
import yaml
from conftest import BIN, CHOICES, CONTEXT, QUESTIONS, TEMPLATE, copy_template, render_copy, run
from renders import PARTS, TREE
from test_render import parse
from where import find_sources

import check_answers

SOURCES = [path for folder in (TREE, PARTS, TEMPLATE / "hooks") for path in folder.rglob("*") if path.is_file()]
# A part of a file uses names that the rest of the file has, or has names that only the rest uses.
OF_PARTS = "F401,F722,F821,I001"


def test_all_texts_name_the_version() -> None:
    citation = yaml.safe_load((TEMPLATE / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"  # Of the format.
    newest = re.findall(r"^## (.*)$", (TEMPLATE / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert citation["version"] == CONTEXT["_version"]
    assert newest == f"{citation['version']}, {citation['date-released']}"


def test_one_line_names_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make address` writes it into every page that names it, and projects link to it."""
    copy = copy_template(tmp_path / "template")
    context = copy / "cookiecutter.json"
    context.write_text(context.read_text().replace(CONTEXT["_repository"], new := "https://gitlab.com/lab/renamed"))
    monkeypatch.setattr(bump, "TEMPLATE", copy)
    bump.write(pages := bump.addresses())
    assert {"README.md", "SECURITY.md", "CITATION.cff", "config.yml", "updates.md"} <= {path.name for path in pages}
    project = render_copy(copy, tmp_path / "out")
    links = re.findall(r"\((\S+)/blob/main/docs/", (project / "README.md").read_text())
    assert links and {*links} == {new} and new in (copy / "README.md").read_text()
    names = [path for path in copy.rglob("*.*") if path.suffix in (".md", ".yml", ".cff", ".json", ".py", ".toml")]
    named = [path.name for path in names if CONTEXT["_repository"] in path.read_text()]
    assert not named and "gh:org" not in "".join(path.read_text() for path in pages)


def test_every_choice_has_a_label_with_when_to_pick_it_in_80_columns() -> None:
    """cookiecutter indents a choice by up to 9 columns, and adds a number and a default to a question."""
    labels = CONTEXT["__prompts__"]
    assert list(labels) == QUESTIONS
    for name, values in CHOICES.items():
        if values != [False, True]:
            assert list(labels[name]) == ["__prompt__", *values]
            assert all(labels[name][value].startswith(f"{value}: pick it ") for value in values)
    for number, (name, label) in enumerate(labels.items(), 1):
        question, *choices = [label] if isinstance(label, str) else label.values()
        default = {"project_slug": "my-experiment"}.get(name, CONTEXT[name])
        shown = f" ({default})" if isinstance(default, str) else ""
        assert len(f"  [{number}/{len(labels)}] {question}{shown}: ") < 80, name
        assert all(len(choice) <= 70 for choice in choices), name


def test_ranks_save_in_less_time_than_a_cluster_waits() -> None:
    cluster = PARTS / "cluster"
    job, script = (cluster / "kubernetes/job.yaml").read_text(), (cluster / "slurm/train.sbatch").read_text()
    pod = re.findall(r"GracePeriodSeconds: (\d+)|STOP_SECONDS.*\n +value: \"(\d+)\"", job)
    slurm = re.findall(r"^#SBATCH --signal=USR1@(\d+)|STOP_SECONDS:-(\d+)", script, re.MULTILINE)
    for (waits, _), (_, saves) in (pod, slurm):
        assert 60 <= int(saves) <= int(waits) - 30
    # A job whose node failed returns to the queue on its own, and its next start adds to the log.
    assert {"#SBATCH --requeue", "#SBATCH --open-mode=append"} <= {*script.splitlines()}


def test_a_container_runs_as_the_user_that_may_write() -> None:
    dockerfile = (TREE / "{{ 'Dockerfile' if cookiecutter.docker else '' }}").read_text()
    assert "useradd --no-create-home --uid 1000" in dockerfile and "\nUSER 1000\nENTRYPOINT " in dockerfile
    assert "runAsUser: 1000" in (PARTS / "cluster/kubernetes/job.yaml").read_text()


def test_pages_state_the_numbers_of_the_code() -> None:
    """Exit codes, which the project's tests compare with those of a run; the longest slug; the group of packages."""
    readme, makefile = ((TREE / name).read_text() for name in ("README.md", "Makefile"))
    codes = [128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    assert (
        "Ctrl-C, SIGTERM or SIGUSR1 saves and stops the run; the launcher's exit code is {}, {} or {}. ".format(*codes)
        in readme
    )
    assert f"; at most {check_answers.SLUG_LIMIT} characters |" in (TEMPLATE / "docs" / "questions.md").read_text()
    groups = re.findall(r"^\[dependency-groups\]\n(\w+) = ", (TREE / "pyproject.toml").read_text(), re.MULTILINE)
    assert groups == re.findall(r"--group (\w+)", makefile) == ["dev"]  # What uv installs, too.


@pytest.mark.parametrize("suffix", [".py", ".yaml", ".yml", ".json", ".toml", ".xml"])
def test_a_template_parses_before_it_is_rendered(suffix: str) -> None:
    for path in SOURCES:
        if path.name.removesuffix("' else '' }}").endswith(suffix):
            parse(path.name, complete(path.read_text(), suffix).encode())


def complete(text: str, suffix: str) -> str:
    """Return a template that is a part of a file as a whole one: of a block, or the items of a list or an object."""
    if suffix == ".json":  # Which has no comments.
        text = re.sub(r"^ *#::.*::#$", "", text, flags=re.MULTILINE)
    if text.lstrip().startswith('"') and suffix == ".json":
        return f"{{{text.strip().removesuffix(',')}}}"
    if text.lstrip().startswith('"') and suffix == ".toml":
        return f"items = [\n{text}]"
    return f"<part>{text}</part>" if suffix == ".xml" else text


def test_template_code_passes_ruff_before_it_is_rendered(tmp_path: Path) -> None:
    """Line length aside, because variables are long, and what a part of a file cannot have."""
    for number, path in enumerate(SOURCES):
        if path.suffix == ".py":
            (tmp_path / f"part_{number}.py").write_text(path.read_text())
    rules = re.findall(r"^select = .*$", (TREE / "pyproject.toml").read_text(), re.MULTILINE)[0]
    run(BIN / "ruff", "check", f"--config=lint.{rules}", f"--ignore=E501,{OF_PARTS}", "--isolated", ".", cwd=tmp_path)


def test_variables_stand_only_in_texts_of_python() -> None:
    """In strings, comments and docstrings: code has none, so that it can be read and linted as it is."""
    for path in SOURCES:
        if path.suffix == ".py":
            code = re.sub(r'"""[\s\S]*?"""|"[^"\n]*"|#.*', "", path.read_text())
            assert "{{" not in code and "{%" not in code, path


def test_paths_are_valid_on_windows() -> None:
    for path in SOURCES:
        assert not set('<>:"|?*\\') & set(str(path.relative_to(TEMPLATE))), path


def test_every_fact_is_stated_by_one_question_and_used() -> None:
    stated: dict[str, set[str]] = {}
    for path in PARTS.rglob("facts.json"):
        question, choice, _ = path.relative_to(PARTS).parts
        assert choice in CHOICES[question]
        for name in json.loads(path.read_text()).keys() - {"refuses"}:
            stated.setdefault(name, set()).add(question)
    texts = [str(path) + path.read_bytes().decode(errors="ignore") for path in SOURCES]
    used = {name for text in texts for name in re.findall(r"fact\(['\"](\w+)['\"]\)", text)}
    assert stated.keys() == used
    assert all(len(questions) == 1 for questions in stated.values()), stated


def test_each_choice_has_a_folder_and_no_folder_is_without_a_choice() -> None:
    for question in PARTS.iterdir():
        assert question.name in CHOICES
        assert {folder.name for folder in question.iterdir()} <= {*map(str, CHOICES[question.name]), "shared"}


def test_a_fragment_of_a_strategy_is_a_unit_with_a_name() -> None:
    """What is included into a larger file is worth the jump: a function, method or class of 15 lines, but for settings.

    What only assigns values has no such bound: a line that differs between strategies, or data of the project's tests.
    """
    for path in sorted(fragments("parallelism")):
        statements = ast.parse(path.read_text()).body
        if not all(isinstance(statement, ast.Assign | ast.AnnAssign) for statement in statements):
            assert all(isinstance(statement, ast.FunctionDef | ast.ClassDef) for statement in statements), path
            assert path.name == "config.py" or len(path.read_text().splitlines()) >= 15, path


def fragments(question: str) -> set[Path]:
    """Return the Python files of a question that a file includes which has lines of its own."""
    computed = rf'" ~ cookiecutter\.{question} ~ "'
    found = set[Path]()
    for path in SOURCES:
        text = path.read_bytes().decode(errors="ignore")
        if len(text.splitlines()) > 1:
            for folder, name in re.findall(rf'include "{question}/(\w+|{computed})/(\w+\.py)"', text):
                found |= {*(PARTS / question).glob(f"{'*' if ' ' in folder else folder}/{name}")}
    return found


# What differs between the files parallel.py by design. The strategies of one set have one text; others their own.
DIFFERENT: dict[str, list[set[str]]] = {
    "Parallel.__init__": [],
    "Parallel.build_mesh": [],
    "Parallel.shard_model": [],
    "Parallel.build_schedule": [],
    "Parallel.compute_loss": [],
    "Parallel.forward_backward": [],
    "Parallel.predict": [],
    "Parallel.clip_grad_norm": [{"ddp", "model_parallel"}],
    "reduce_scatter_as_tree": [{"ddp", "model_parallel"}],
    "Parallel.average_buffers": [{"data_parallel", "fsdp", "pipeline"}, {"ddp", "model_parallel"}, {"tensor", "mesh"}],
    "Parallel.full_state_dict": [{"ddp", "model_parallel", "data_parallel"}, {"fsdp", "tensor"}],
    "Parallel.load_full_state_dict": [
        {"ddp", "model_parallel", "data_parallel"},
        {"fsdp", "tensor"},
        {"pipeline", "mesh"},
    ],
    "prepare_block": [{"ddp", "model_parallel", "data_parallel"}, {"fsdp", "tensor"}],
}


def test_what_several_strategies_define_has_one_text() -> None:
    """A strategy is one whole file, so what several do in the same way is repeated; the copies must not drift apart."""
    texts: dict[str, dict[str, str]] = {}
    for path in sorted((PARTS / "parallelism").glob("*/parallel.py")):
        for name, text in definitions(path.read_text()).items():
            texts.setdefault(name, {})[path.parent.name] = text
    for name, of_strategy in texts.items():
        for strategies in DIFFERENT.get(name, [{*of_strategy}]):
            found = {of_strategy[strategy] for strategy in strategies if strategy in of_strategy}
            assert len(found) <= 1, f"{name} differs between {', '.join(sorted(strategies))}"


def definitions(text: str) -> dict[str, str]:
    """Return the texts of a file's functions, methods and constants, comments included, by qualified name."""
    found, lines = dict[str, str](), text.splitlines()
    for parent in ast.parse(text).body:
        for node in parent.body if isinstance(parent, ast.ClassDef) else [parent]:
            if isinstance(node, ast.FunctionDef | ast.Assign):
                name = node.name if isinstance(node, ast.FunctionDef) else ast.unparse(node.targets[0])
                first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
                qualified = name if node is parent else f"{parent.name}.{name}"
                found[qualified] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def test_the_sources_of_a_rendered_file_are_found() -> None:
    """`make where` prints them; a path that no file has is one line with near matches."""
    stub = f"{TREE.name}/src/{{{{cookiecutter.__package}}}}"
    assert find_sources("src/my_experiment/train.py") == [f"{stub}/train.py"]
    mesh = [f"{stub}/parallel.py", "templates/parallelism/mesh/parallel.py"]
    assert find_sources("src/digits_8x8/parallel.py", project_slug="digits-8x8", parallelism="mesh") == mesh
    assert find_sources("src/my_experiment/digits.npz")[0].startswith(f"{stub}/{{{{ 'digits.npz'")
    script = TEMPLATE / "tests" / "template" / "where.py"
    paths = f"{TEMPLATE}:{TEMPLATE / 'tests'}"
    error = run(BIN / "python", script, "src/train.py", cwd=TEMPLATE, code=2, PYTHONPATH=paths).stderr
    assert error == "error: these answers render no file 'src/train.py'; give FILE=src/my_experiment/train.py\n"
