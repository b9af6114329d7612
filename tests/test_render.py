"""Combinations of answers render to clean files; a file that several combinations share is checked once."""

from __future__ import annotations

import json
import re
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import yaml
from commands import RULES
from conftest import CHOICES, CONTEXT, TEMPLATE, Bake, read_tree, run
from cookiecutter.main import cookiecutter
from documents import commands, covering_answers, spans
from prose import Document
from rendering import Rendering, alike, covering, different, read, write
from traces import EVERYWHERE, IN_PROSE, RULED_OUT, find_traces, is_searched, words

BIN = Path(sys.executable).parent
PACKAGE = "src/my_experiment"


@pytest.fixture(scope="module")
def rendering() -> Rendering:
    return Rendering()


def test_all_combinations_are_rendered_as_cookiecutter_does_it(rendering: Rendering, bake: Bake) -> None:
    one_license = [project for project in rendering.projects if project.answers["license"] == "MIT"]
    assert len(one_license) == 6 * 3 * 2 * 3 * 4 * 2
    assert len(rendering.projects) - len(one_license) == (3 + 5) * 4 * 2 * 4
    # Together, these have every choice.
    chosen = [
        {name: values[i % len(values)] for name, values in CHOICES.items()} | {"license": "MIT"} for i in range(6)
    ]
    chosen += [{name: values[0] for name, values in CHOICES.items()} | {"license": name} for name in CHOICES["license"]]
    for i, answers in enumerate(chosen):
        files = next(project.files for project in rendering.projects if project.answers == answers)
        assert {file.path: file for file in read(bake(str(i), **answers))} == files


@pytest.mark.slow
def test_all_combinations_of_every_license_have_no_other_files(rendering: Rendering) -> None:
    """So that the tests of this file, which see some of them, check each distinct file."""
    everything = Rendering(every_license=True)
    assert len(everything.projects) == 6 * 3 * 2 * 3 * 4 * 2 * 5
    known, found = ({(file.path, file.text) for file in some.texts()} for some in (rendering, everything))
    assert found == known, sorted(path for path, _ in found - known)


def test_every_branch_of_the_templates_is_taken(rendering: Rendering) -> None:
    """What no answers lead to can be deleted."""
    branches, taken = rendering.recorder.branches, rendering.recorder.taken
    print(f"{len(branches & taken)} of {len(branches)} branches in {len(rendering.projects)} projects")
    assert not branches - taken, "\n".join(["never taken:", *sorted(branches - taken)])
    assert len(branches) > 500 and taken <= branches


def parse(name: str, content: bytes) -> None:
    """Parse a file according to its suffix; raise an error if it is invalid."""
    suffix = Path(name).suffix
    if suffix == ".py":
        compile(content, name, "exec")
    elif suffix in (".yaml", ".yml"):
        list(yaml.safe_load_all(content))
    elif suffix == ".json":
        json.loads(content)
    elif suffix == ".toml":
        tomllib.loads(content.decode())
    elif suffix == ".xml":
        ElementTree.fromstring(content)


def test_rendered_files_parse(rendering: Rendering) -> None:
    for file in rendering.owners:
        parse(file.path, file.content)
        assert file.executable or not file.path.endswith(".sh"), file.path


def test_template_sources_parse_before_they_are_rendered() -> None:
    folders = [TEMPLATE / "{{cookiecutter.project_slug}}", TEMPLATE / "templates", TEMPLATE / "hooks"]
    sources = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert len(sources) > 40
    for path in sources:
        parse(path.name, path.read_bytes())


def test_pyproject_records_the_answers(rendering: Rendering) -> None:
    for project in rendering.projects:
        settings = tomllib.loads(project.files["pyproject.toml"].content.decode())
        answers = {k: str(v).lower() if isinstance(v, bool) else v for k, v in project.answers.items()}
        assert settings["tool"]["ddp-template"] == answers | {"version": CONTEXT["_version"]}


def test_rendered_files_have_no_stray_white_space(rendering: Rendering) -> None:
    for file in rendering.texts():
        assert file.text.endswith("\n") and not file.text.endswith("\n\n"), file.path
        assert not re.search(r"[ \t]+$", file.text, re.MULTILINE), file.path
        if not file.path.endswith((".py", "LICENSE")):
            prose = re.sub(r"^```python\n.*?^```", "code", file.text, flags=re.MULTILINE | re.DOTALL)
            assert "\n\n\n" not in prose, file.path


def test_the_code_passes_the_linter_and_the_formatter(rendering: Rendering, tmp_path: Path) -> None:
    """In whole projects, because the order of imports depends on the folders; pyproject.toml is linted too."""
    for number, project in enumerate(covering(rendering.projects, lambda file: file.path.endswith(".py"))):
        write(project.files.values(), tmp_path / "projects" / str(number))
    rendering.write_each(tmp_path / "settings", "pyproject.toml")
    run(BIN / "ruff", "format", "--check", "--no-cache", ".", cwd=tmp_path)
    run(BIN / "ruff", "check", "--no-cache", ".", cwd=tmp_path)


def test_the_code_passes_mypy(rendering: Rendering, tmp_path: Path) -> None:
    """One run for packages of several names, so that PyTorch is analyzed once."""
    projects = covering(rendering.projects, lambda file: file.path.startswith(PACKAGE) and file.path.endswith(".py"))
    for number, project in enumerate(projects):
        source = write(project.files.values(), tmp_path / str(number)) / PACKAGE
        (tmp_path / "src").mkdir(exist_ok=True)
        source.rename(tmp_path / "src" / f"package_{number}")
    (tmp_path / "0" / "pyproject.toml").rename(tmp_path / "pyproject.toml")
    run(BIN / "mypy", "--cache-dir", tmp_path / "cache", cwd=tmp_path)


def test_scripts_pass_shellcheck(rendering: Rendering, tmp_path: Path) -> None:
    scripts = [*rendering.write_each(tmp_path, "*.sh"), *rendering.write_each(tmp_path, "*.sbatch")]
    run(BIN / "shellcheck", *scripts, TEMPLATE / "tests" / "demo.sh", TEMPLATE / ".ci" / "run", cwd=TEMPLATE)


def test_dockerfiles_pass_hadolint(rendering: Rendering, tmp_path: Path) -> None:
    run(BIN / "hadolint", *rendering.write_each(tmp_path, "Dockerfile"), cwd=TEMPLATE)


def test_markdown_is_well_formed_and_its_links_lead_somewhere(rendering: Rendering) -> None:
    documents = {file: Document(file.path, file.text) for file in rendering.owners if file.path.endswith(".md")}
    pages = [*TEMPLATE.glob("*.md"), *TEMPLATE.glob("docs/*.md")]
    own = {
        name: Document(name, (TEMPLATE / name).read_text()) for name in (str(p.relative_to(TEMPLATE)) for p in pages)
    }
    broken = {fault for document in [*documents.values(), *own.values()] for fault in document.faults()}
    for project in rendering.projects:
        present = {path: documents[file] for path, file in project.files.items() if file in documents}
        broken |= {fault for document in present.values() for fault in document.broken_links(present, project.files)}
    files = [str(path.relative_to(TEMPLATE)) for path in (*TEMPLATE.glob("*"), *TEMPLATE.glob("docs/*"))]
    broken |= {fault for document in own.values() for fault in document.broken_links(own, files)}
    assert not broken, "\n".join(sorted(broken))


def test_a_project_has_no_traces_of_the_template_or_of_other_choices(rendering: Rendering) -> None:
    template = r"cookiecutter|jinja|\{\{|\}\}|#::|::#|#//|//#"
    traces = set()
    for file in rendering.texts():
        if not file.path.startswith(".github"):
            traces |= {f"{file.path}: {found}" for found in re.findall(template, re.sub("Jinja2==.*", "", file.text))}
        traces |= set(find_traces(file, rendering.owners[file]))
    assert not traces, "\n".join(sorted(traces))


def test_each_trace_is_left_by_its_own_choice(rendering: Rendering) -> None:
    """Each alternative of a pattern: one that matches nothing here would find nothing elsewhere either."""
    for table, wanted in ((EVERYWHERE, True), (IN_PROSE, True), (RULED_OUT, False)):
        for (question, value), trace in table.items():
            searched = [file for file in rendering.texts() if is_searched(file.path, table, question)]
            owned = [f for f in searched if any((p.answers[question] == value) == wanted for p in rendering.owners[f])]
            for word in trace.split("|"):
                assert any(words(word, file.text) for file in owned), word


def test_the_projects_of_the_tests_of_documents_show_everything(rendering: Rendering) -> None:
    """Each line, name and command that the documents of any project have; tests/test_documents.py sees no others."""
    chosen, shown, everything = [*covering_answers()], set(), set()
    for file, owners in rendering.owners.items():
        if file.path in ("README.md", "Makefile") or file.path.startswith("docs/"):
            parts = {*file.text.splitlines(), *spans(file.text), *commands(file.text, set(RULES))}
            everything |= parts
            shown |= parts if any(project.answers in chosen for project in owners) else set()
    assert everything - shown == set(), "let covering_answers in tests/documents.py draw others"
    assert len(everything) > 1500


def test_every_choice_changes_the_project(rendering: Rendering) -> None:
    """Each one, whatever the other answers are; the table of answers does not count."""
    trees = set()
    for project in rendering.projects:
        trees.add(frozenset(file for path, file in project.files.items() if path != "pyproject.toml"))
    assert len(trees) == len(rendering.projects)


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


def package(*names: str) -> set[str]:
    return {f"{PACKAGE}/{name}" for name in names}


def docs(*recipes: str) -> set[str]:
    return {f"docs/{recipe}.md" for recipe in recipes}


EXPERIMENTS = {f"configs/{name}.yaml" for name in ("default", "one_gpu", "eight_gpus")}
# What every strategy has its own version of.
STRATEGY = {"README.md", "tests/support.py", *package("parallel.py", "config.py", "launch/preflight.py")}
# The files that the answer to a question changes, besides pyproject.toml, which records the answers.
CHANGED = {
    "parallelism": {
        *STRATEGY,
        # Micro-batches, how a block is sharded, what a split between blocks needs, and the pipeline's bubble.
        *EXPERIMENTS,
        *package("model.py", "splitting/__init__.py", "splitting/sequence.py", "splitting/stages.py"),
        *package("splitting/replication.py", "splitting/sharding.py"),
        *package("benchmark/__init__.py", "benchmark/measure.py", "benchmark/table.py", "benchmark/bubble.py"),
        # What a simulation has to know of the strategy.
        *package("plan/layout.py"),
        # Whether ranks may share a device.
        *package("runtime/process_group.py"),
        # How many processes are started.
        *("AGENTS.md", "Makefile", "Dockerfile", "scripts/launch.sh", "scripts/multinode.sh", ".vscode/launch.json"),
        *(".run/train_on_two_ranks.run.xml", "scripts/train.sbatch", "scripts/job.yaml", "scripts/trainjob.yaml"),
        # What recipes say about the strategy, and what one process need not test.
        *docs("any_model", "contrastive", "ema", "gan", "transformers"),
        # What one process cannot do, and mistakes that only this strategy can make.
        *docs("coming_from", "exercises", "from_a_loop", "walk"),
        *("tests/test_training.py", "tests/test_gpu.py"),
    },
    "task": {
        *("README.md", "LICENSE", "tests/support.py", "tests/test_dataset.py", "tests/test_environments.py"),
        *("tests/walk_environment.py", "tests/test_generate.py"),
        *EXPERIMENTS,
        *package("model.py", "dataset.py", "config.py", "launch/preflight.py", "digits.npz", "digits.md"),
        *package("reporting/generate.py", "__main__.py"),
        *docs("any_model", "contrastive", "ema", "finetune", "gan", "images", "stream", "table", "transformers"),
        # Experience is collected instead of read, and evaluation plays; the settings depend on the environment.
        *docs("from_a_loop", "sweep"),
        *("Makefile", "constraints.txt", "docs/environment.md", "tests/plain.py", "tests/test_data.py"),
        *("tests/test_evaluate.py", "tests/test_experiment.py", "tests/test_gpu.py", "tests/test_training.py"),
        *package("evaluate.py", "launch/__init__.py", "launch/arguments.py", "launch/spaces.py", "launch/values.py"),
        *package("splitting/__init__.py", "splitting/environments.py", "splitting/experience.py"),
        *package("splitting/policy.py", "benchmark/measure.py", "benchmark/steps.py", "reporting/curves.py"),
        *package("reporting/__init__.py", "reporting/pictures.py", "plan/report.py"),
    },
    "launcher": {
        *("README.md", "scripts/launch.sh", ".vscode/launch.json", ".run/train_on_two_ranks.run.xml"),
        *("scripts/job.yaml", "scripts/trainjob.yaml", *package("launch/spawn.py", "launch/values.py")),
        *package("launch/torchrun.py", "launch/agent.py"),
    },
    "cluster": {
        *("README.md", ".gitignore", "scripts/train.sbatch", "docs/sweep.md"),
        *("scripts/volume.yaml", "scripts/job.yaml", "scripts/trainjob.yaml"),
    },
    "tracker": {
        *("README.md", "Makefile", "Dockerfile", "constraints.txt"),
        *package("reporting/tracker.py", "reporting/follow.py"),
    },
    "docker": {".github/dependabot.yml", "README.md", "Dockerfile", ".dockerignore", ".devcontainer.json"},
    "license": {"LICENSE", "CITATION.cff", "Dockerfile", ".dockerignore"},
}


def test_an_answer_changes_only_the_expected_files(rendering: Rendering) -> None:
    """By their whole paths; and a file that no answer to the question changes is not expected."""
    assert CHANGED.keys() == CHOICES.keys()
    for question, expected in CHANGED.items():
        pairs = [(first, other) for first, *others in alike(rendering.projects, question) for other in others]
        changes = [different(first, other) - {"pyproject.toml"} for first, other in pairs]
        assert set().union(*changes) == expected, question
        if question == "parallelism":
            assert all(change >= STRATEGY for change in changes)
