"""What READMEs, Makefiles, workflows, Dockerfiles and pages claim agrees with the files that they are about."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from conftest import CHOICES, CONTEXT, QUESTIONS, TEMPLATE, Bake, run
from density import count
from renders import TREE, Project, Rendering, pairs

README = (TEMPLATE / "README.md").read_text()
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve thirteen".split()
# Written by hand, so that a change of facts.json is a change of this.
REFUSED = {("control", "fsdp"), ("control", "mesh"), ("control", "pipeline"), ("control", "tensor")}
# Packages by the name under which a project imports them, where it differs.
PACKAGES = {"yaml": "pyyaml", "mlflow": "mlflow-skinny"}


@pytest.fixture(scope="module")
def rendering() -> Rendering:
    return Rendering(pairs())


def lowest_python(text: str) -> str:
    """Return the oldest Python that a Makefile accepts."""
    return ".".join(re.findall(r"sys\.version_info < \((\d+), (\d+)\)", text)[0])


def targets(makefile: str) -> set[str]:
    """Return the targets of a Makefile that are commands."""
    return {*re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[0].split()}


def named_targets(text: str) -> Iterator[str]:
    """Yield the targets that commands in a text make: a word after ``make`` at the beginning of code."""
    for commands in re.findall(r"(?:`|^|&& |run: |; )make ((?:[a-z][a-z-]*[a-z] ?)+)", text, re.MULTILINE):
        yield commands.split()[0]


def test_counts_of_questions_and_strategies_are_right() -> None:
    assert f"It asks {NUMBERS[len(QUESTIONS)]} questions" in README
    lessons = len(re.findall(r"^\| \d+ \| ", README, re.MULTILINE))
    assert f"\n{NUMBERS[lessons].title()} lessons in one folder" in README
    questions = (TEMPLATE / "docs" / "questions.md").read_text()
    assert f"## {NUMBERS[len(CHOICES['parallelism'])].title()} ways to split the work" in questions
    for name, values in CHOICES.items():
        row = re.findall(rf"^\| `{name}` \| ([^|]*) \|", questions, re.MULTILINE)[0]
        assert re.findall(r"`([^`]+)`", row) == [str(value).lower() if name == "docker" else value for value in values]


def test_lines_of_the_default_package_are_those_of_the_readme(rendering: Rendering) -> None:
    default = {name: values[0] for name, values in CHOICES.items()}
    (project,) = [project for project in rendering.projects if project.answers == default]
    texts = [file.text for file in project.matching("src/*.py")]
    of_code = sum(count(text).numbers["lines of code"] for text in texts)
    of_all = sum(text.count("\n") for text in texts)
    claimed = [
        int(each.replace(",", ""))
        for each in re.findall(r"has ([\d,]+) lines of code by default \(([\d,]+)", README)[0]
    ]
    assert claimed == [round(of_code, -1), round(of_all, -2)]


def test_labels_say_what_their_strategy_is_for() -> None:
    labels = CONTEXT["__prompts__"]["parallelism"]
    wanted = {"ddp": "fits on one", "fsdp": "too large for one", "pipeline": "deep", "tensor": "layers are huge"}
    assert all(words in labels[strategy] for strategy, words in wanted.items())


def test_combinations_that_are_refused_are_those_written_here(rendering: Rendering) -> None:
    rendered = {(project.answers["task"], project.answers["parallelism"]) for project in rendering.projects}
    every = {(task, parallelism) for task in CHOICES["task"] for parallelism in CHOICES["parallelism"]}
    assert every - rendered == REFUSED


def test_all_files_name_the_same_versions_of_python(rendering: Rendering) -> None:
    project = tomllib.loads(rendering.projects[0].files["pyproject.toml"].content.decode())["project"]
    lowest = project["requires-python"].removeprefix(">=")
    makefiles = [(folder / "Makefile").read_text() for folder in (TEMPLATE, TREE)]
    assert [lowest_python(text) for text in makefiles] == [lowest, lowest]
    newest = re.findall(rf"Python {lowest} to (3\.\d+)", README)[0]
    workflow = (TEMPLATE / ".github" / "workflows" / "test.yml").read_text()
    assert f'python: ["{lowest}", "{newest}"]' in workflow
    for file in rendering.texts():
        if file.path == "Dockerfile":
            (used,) = re.findall(r"^FROM python:3\.(\d+)", file.text, re.MULTILINE)
            assert int(lowest[2:]) <= int(used) <= int(newest[2:])


def test_targets_that_prose_and_workflows_name_exist(rendering: Rendering) -> None:
    own, of_projects = (targets((folder / "Makefile").read_text()) for folder in (TEMPLATE, TREE))
    pages = [TEMPLATE / name for name in ("README.md", "CONTRIBUTING.md", "hooks/post_gen_project.py")]
    for page in [*pages, *TEMPLATE.glob("docs/**/*.md"), *TEMPLATE.glob(".github/workflows/*.yml")]:
        assert {*named_targets(page.read_text())} <= own | of_projects, page
    assert {*named_targets((TEMPLATE / ".ci" / "run").read_text())} <= own
    for file in rendering.texts():
        if file.path.endswith((".md", ".yml", "Makefile", ".sh", ".json", ".xml")):
            of_the_template = " ".join(re.findall(r"`make [^`]*`(?= in the template)", file.text))
            assert {*named_targets(of_the_template)} <= own, file.path
            assert {*named_targets(file.text)} <= of_projects | {*named_targets(of_the_template)}, file.path


def test_all_files_name_the_same_lowest_pytorch(rendering: Rendering) -> None:
    settings = tomllib.loads(rendering.projects[0].files["pyproject.toml"].content.decode())["project"]
    (lowest,) = (re.split("[=,]", text)[1] for text in settings["dependencies"] if text.startswith("torch>="))
    workflow = (TEMPLATE / ".github" / "workflows" / "test.yml").read_text()
    assert {*re.findall(r"torch==([\d.]+)\.\*", workflow)} == {lowest}
    assert re.findall(r"PyTorch ([\d.]+\d) or newer", README) == [lowest]


def test_a_job_has_as_many_pods_as_machines(rendering: Rendering) -> None:
    for file in rendering.texts():
        if file.path == "scripts/job.yaml" and "NODES" in file.text:
            *_, job = yaml.safe_load_all(file.text)
            (container,) = job["spec"]["template"]["spec"]["containers"]
            nodes = [int(each["value"]) for each in container["env"] if each["name"] == "NODES"]
            assert nodes == [job["spec"]["completions"]] == [job["spec"]["parallelism"]]


def test_workflows_run_what_they_are_for(rendering: Rendering) -> None:
    targets = {"test.yml": ("make setup", "make lint", "make test"), "proof.yml": ("make setup", "make proof")}
    assert "set -- test test-long" in (TEMPLATE / ".ci" / "run").read_text()
    for file in rendering.texts():
        if file.path.startswith(".github/workflows/"):
            jobs = yaml.safe_load(file.text)["jobs"].values()
            commands = [step.get("run", "") for job in jobs for step in job["steps"]]
            for target in targets[Path(file.path).name]:
                assert any(target in command for command in commands), (file.path, target)


def test_an_image_has_the_files_that_its_command_needs(rendering: Rendering) -> None:
    dockerfiles = [file for file in rendering.texts() if file.path == "Dockerfile"]
    assert dockerfiles
    for file in dockerfiles:
        words = [line.split()[1:-1] for line in file.text.splitlines() if line.startswith("COPY ")]
        copied = {word for line in words for word in line}
        assert copied >= {"pyproject.toml", "constraints.txt", "configs", "scripts", "src"}
        (entrypoint,) = re.findall(r'^ENTRYPOINT \["(.*)"\]$', file.text, re.MULTILINE)
        for project in rendering.owners[file]:
            assert entrypoint in project.files
            assert all(any(f"{path}/".startswith(f"{word}/") for path in project.files) for word in copied), copied


def imported(project: Project) -> set[str]:
    """Return the packages that each start of a command imports, except Python's and the project's own."""
    names = set()
    for file in project.matching("src/*.py"):
        for node in ast.parse(file.text).body:
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(str(node.module).split(".")[0])
    return {PACKAGES.get(name, name) for name in names - sys.stdlib_module_names - {"my_experiment"}}


def test_what_a_package_imports_is_what_its_project_requires(rendering: Rendering) -> None:
    """Itself: that another package requires it, too, may change."""
    for project in rendering.projects:
        settings = tomllib.loads(project.files["pyproject.toml"].content.decode())["project"]
        required = [
            *settings["dependencies"],
            *(name for names in settings.get("optional-dependencies", {}).values() for name in names),
        ]
        names = {re.split(r"[\[<>=!~; ]", text)[0] for text in required}
        assert imported(project) <= names, (project.answers, imported(project) - names)


@pytest.mark.long
@pytest.mark.parametrize("launcher", CHOICES["launcher"])
def test_numbers_that_start_no_machines_are_refused(bake: Bake, launcher: str) -> None:
    script: Path = bake(launcher=launcher) / "scripts" / "launch.sh"
    two = {"NODES": "2", "HEAD": "127.0.0.1"}
    for environment, named in (
        (two | {"NODE_RANK": "2"}, "NODE_RANK from 0 to 1"),
        (two | {"NODE_RANK": "-1"}, "NODE_RANK from 0 to 1"),
        (two, "NODE_RANK from 0 to 1"),
        ({"NODES": "2", "NODE_RANK": "0"}, "requires HEAD"),
        ({"NPROC": "0"}, "have to be numbers"),
        ({"NODES": "two"}, "have to be numbers"),
    ):
        # One that is accepted would wait for the other machine.
        error = run("timeout", "60", script, "train", cwd=script.parent, code=2, **environment).stderr
        assert error.startswith("error: ") and error.count("\n") == 1 and named in error, (environment, error)
