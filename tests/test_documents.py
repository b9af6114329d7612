"""What the documents of the template and of its projects say is so: commands, settings, names, files and figures."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from branches import Recorder
from commands import RULES, Command, made_run
from conftest import CHOICES, TEMPLATE, Bake, leave_to_weekly, run
from documents import (
    commands,
    covering_answers,
    documents,
    fences,
    is_command,
    program_of,
    sections,
    spans,
    tables,
)
from names import Names
from recipes import SENTENCE, apply
from rendering import one_environment, render
from runs import task_of
from slurm import MISSING, start_slurm
from test_recipes import LESSONS, OF_CONTROL, WEEKLY
from test_recipes import NAMES as RECIPES
from test_symptoms import REPRODUCED

PROGRAMS = set(RULES)
# Inline code that names nothing in the project, and what it is.
ELSEWHERE = {
    **dict.fromkeys(("--section.key value", "__private", "#:: ... ::#"), "an example"),
    **dict.fromkeys(("task=language", "task=control"), "an example"),
    "127.0.0.1:5678": "an address",
    **dict.fromkeys(("runs/", "config.yaml", "provenance.json", "metrics.jsonl"), "what a run leaves"),
    **dict.fromkeys(("curves.png", "confusion.png", "misread.png", "samples.txt", "episode.png"), "what a run leaves"),
    **dict.fromkeys(("step-*.pt", "step-*.dcp", "tensorboard/"), "what a run leaves"),
    **dict.fromkeys(("benchmark.json", "benchmark.png"), "what benchmark leaves"),
    **dict.fromkeys(("trace-rank0.json", "trace-rank1.json", "snapshot-rank0.pickle"), "what benchmark leaves"),
    **dict.fromkeys(("wandb/", "../mlflow.db", "../mlflow/"), "what a run leaves"),
    ".venv/bin/wandb sync runs/default/wandb/offline-run-*": "needs an account",
    "mlflow ui --backend-store-uri sqlite:///runs/mlflow.db": "of the whole of mlflow",
    **dict.fromkeys(("(targets >= 0).sum()", "len(targets)", '{"loss": ..., "kl": ...}'), "what a reader may write"),
    **dict.fromkeys(("/data/", "model.safetensors"), "a file of the reader"),
    "GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)": "code for transformers",
    **dict.fromkeys(("-genv MASTER_ADDR HOST", "mpiexec.mpich"), "an option of MPICH, and its program"),
    "--selector jobset.sigs.k8s.io/jobset-name=my-experiment": "an option of kubectl logs",
    "restricted": "a policy of Kubernetes",
    **dict.fromkeys(("LimitMEMLOCK=infinity", "IPC_LOCK"), "a setting of containerd, and a capability of Linux"),
    **dict.fromkeys(("ibv_reg_mr", "ibv_create_qp"), "functions of libibverbs, which NCCL's messages name"),
    **dict.fromkeys(("NET/IB", "NET/Socket"), "what NCCL logs"),
    "NCCL_IB_DISABLE=1": "a variable of NCCL",
    ".cruft.json": "a file of cruft",
    **dict.fromkeys(("patch -p1 < mistake.diff", "patch -R -p1 < mistake.diff", "patch"), "a program of the system"),
    **dict.fromkeys(("mistake.diff", "step.diff", "latest.pt", "patch loop.py step.diff"), "a file of the reader"),
    **dict.fromkeys(("drop_last=True", "torch.compile(model)", "nn.DataParallel"), "what a reader may have written"),
    "_orig_mod.": "a prefix that torch.compile adds",
    **dict.fromkeys(("--array=1-4%2", "xargs"), "an option of sbatch, and a program of the system"),
    "KillWait": "a setting of Slurm",
    "MALLOC_MMAP_THRESHOLD_=65536": "a variable of the C library",
    "dmesg": "a program of the system",
    ".venv/bin/python -m torch.distributed.flight_recorder.fr_trace runs/default --prefix collectives_": "of PyTorch",
    **dict.fromkeys(("RescaleAction", "NormalizeObservation", "NormalizeReward"), "wrappers of Gymnasium"),
    **dict.fromkeys(('metadata["render_modes"]', "reset(seed=...)"), "parts of Gymnasium's class"),
}


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Projects that together show all that is in documents, as tests/test_render.py verifies."""
    with one_environment(Recorder()):
        return [Path(render(str(tmp_path_factory.mktemp("project")), **answers)) for answers in covering_answers()]


@pytest.fixture(scope="module")
def pages(projects: list[Path]) -> list[tuple[Path, str, str]]:
    """Every document once: the project (or the template) that has it, its name and its text, READMEs first."""
    distinct: dict[tuple[bool, str], tuple[Path, str, str]] = {}
    for root in (TEMPLATE, *projects):
        for name, text in manual(root).items():
            distinct.setdefault((root == TEMPLATE, text), (root, name, text))
    return sorted(distinct.values(), key=lambda page: page[1].startswith("docs/"))


def manual(root: Path) -> dict[str, str]:
    """Return the documents of a repository; the help of its Makefile is one, with each command as inline code.

    In docs/coming_from.md, the first column has the names and commands of other tools.
    """
    text = (root / "Makefile").read_text()
    shown = re.sub(r"((?:[A-Z]+=\S+ )?\bmake [a-z-]+)", r"`\1`", "\n".join(re.findall(r'echo "(make .*)"', text)))
    comments = "\n".join(re.findall(r"^# (.*)", text, re.MULTILINE))
    found = documents(root) | {"Makefile": f"{comments}\n{shown}"}
    compared = {"docs/coming_from.md"} & found.keys()
    return found | {name: re.sub(r"^\|.*? \|", "| there |", found[name], flags=re.MULTILINE) for name in compared}


@pytest.fixture(scope="module")
def found(pages: list[tuple[Path, str, str]], projects: list[Path]) -> list[Command]:
    """Each command that a document shows, once for the template and once for the projects.

    Except those of lessons, which tests/test_teaching.py and tests/test_sweep.py run in their order.
    """
    distinct: dict[tuple[bool, str], Command] = {}
    for root, name, text in pages:
        if Path(name).stem in LESSONS:
            continue
        if root == TEMPLATE:
            name = f"the template's {name}"
        for command in commands(text, PROGRAMS):
            # The template's documents also show commands for a project.
            moved = root == TEMPLATE and re.search(r"scripts/|make (setup|train)\b|/test_split", command)
            folder = projects[0] if moved else root
            # Tasks differ in the number of their last checkpoint.
            same = re.sub(r"step-\d+", "step", command)
            distinct.setdefault((folder == TEMPLATE, same), Command(command, name, folder))
    return list(distinct.values())


def test_each_command_has_a_rule(found: list[Command]) -> None:
    for command in found:
        assert program_of(command.text) in RULES, (
            f"{command.document} shows `{command.text}`: add its program to RULES in tests/commands.py, to be run or "
            "checked by its own parser; or, with the reason, to be neither"
        )
    assert {program_of(command.text) for command in found} == PROGRAMS, "a rule is no longer needed"
    kinds = [RULES[program_of(command.text)].kind for command in found]
    print(len(found), "commands:", {kind: kinds.count(kind) for kind in kinds})


def of_program(found: list[Command], program: str) -> list[Command]:
    """Return a program's commands, without those of recipes, which need the recipe's edits."""
    own = [each for each in found if program_of(each.text) == program and not each.document.startswith("docs/")]
    assert own, f"only recipes show {program}: leave it out of HERE"
    return own


# Without Slurm's; and only recipes start Python with a program of their own.
HERE = {name: rule.kind for name, rule in RULES.items() if not rule.slurm and name != "python"}
# Clients that the system's packages do not include, and why their commands are then not parsed.
CLIENTS = {"docker": "no docker here", "kubectl": "no kubectl here"}


@pytest.mark.parametrize("program", [name for name, kind in HERE.items() if kind == "check"])
def test_a_command_that_cannot_be_run_is_accepted_by_its_parser(found: list[Command], program: str) -> None:
    if program in CLIENTS and not shutil.which(program):
        pytest.skip(CLIENTS[program])
    for command in of_program(found, program):
        RULES[program].act(command)


@pytest.mark.slow
@pytest.mark.parametrize("program", [name for name, kind in HERE.items() if kind == "run"])
def test_a_command_runs(found: list[Command], program: str) -> None:
    if program in ("mpirun", "mpiexec") and not shutil.which(program):
        pytest.skip(f"no {program} here: apt-get install openmpi-bin")
    for command in of_program(found, program):
        RULES[program].act(command)


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)} here: apt-get install slurm-wlm munge")
def test_the_commands_for_slurm(found: list[Command]) -> None:
    with start_slurm() as slurm:
        for program in [name for name, rule in RULES.items() if rule.slurm]:
            for command in of_program(found, program):
                RULES[program].act(command, slurm)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "task"),
    leave_to_weekly(
        [
            *((each, "digits") for each in RECIPES),
            *((each, "control") for each in OF_CONTROL),
            ("finetune", "language"),
        ],
        [*((each, "digits") for each in WEEKLY), ("finetune", "language")],
    ),
)
def test_the_commands_of_a_recipe(found: list[Command], recipe: str, task: str, tmp_path: Path) -> None:
    """Each is run where a reader enters it: before or after the edits. test_recipes.py runs the last training."""
    shown = [each for each in found if each.document == f"docs/{recipe}.md" and task_of(each.project) == task]
    assert shown
    for root in dict.fromkeys(command.project for command in shown):
        page = (root / "docs" / f"{recipe}.md").read_text()
        project = Path(shutil.copytree(root, tmp_path / root.parent.name, symlinks=True))
        edits = SENTENCE.search(page)
        assert edits is not None
        before = commands(page[: edits.start()], PROGRAMS)
        own = [command.text for command in shown if command.project == root and not is_trained_elsewhere(command, page)]
        if any("/checkpoints/" in text for text in own):
            made_run(project, "full")  # By the model that the recipe has not changed yet.
        for number, text in enumerate(own):
            if text not in before and (number == 0 or own[number - 1] in before):
                apply(project / "docs" / f"{recipe}.md", project)
            act = RULES[program_of(text)].act
            assert act is not None
            act(Command(text, f"docs/{recipe}.md", project))


def is_trained_elsewhere(command: Command, page: str) -> bool:
    """Return whether test_recipes.py runs a command, which it does with the last training of a recipe's own task."""
    trainings = [text for text in commands(page, PROGRAMS) if "launch.sh train" in text]
    return task_of(command.project) != "language" and command.text == trainings[-1]


# The accelerators of the machines that an experiment is for, or 0 for a machine that has none.
DEVICES = {"default.yaml": (0, 1, 2, 4), "one_gpu.yaml": (1,), "eight_gpus.yaml": (8,)}
CHECK = """
import sys
from my_experiment.__main__ import COMMANDS, check
from my_experiment.config import Config
from my_experiment.launch import parse
config = Config(**parse(["train", "--config", sys.argv[1]], COMMANDS)[1])
for devices in sys.argv[2:]:
    check(config, config.parallel.default_nproc(int(devices)), trains=True)
"""


@pytest.mark.parametrize("parallelism", CHOICES["parallelism"])
@pytest.mark.parametrize("task", CHOICES["task"])
def test_each_experiment_passes_the_checks_before_training(bake: Bake, parallelism: str, task: str) -> None:
    project = bake(parallelism=parallelism, task=task)
    experiments = sorted((project / "configs").iterdir())
    assert experiments
    for path in experiments:
        run(sys.executable, "-c", CHECK, path, *map(str, DEVICES[path.name]), cwd=project, PYTHONPATH="src")


def test_each_name_has_a_meaning(pages: list[tuple[Path, str, str]], projects: list[Path]) -> None:
    # The template's documents are about its projects, too.
    known = {root: Names(root) for root in projects} | {TEMPLATE: Names(TEMPLATE, *projects[:3])}  # One per cluster.
    unknown: dict[str, str] = {}
    for root, page, text in pages:
        names = {name for name in (*spans(text), *listed_files(text)) if not is_command(name, PROGRAMS)} - PROGRAMS
        unknown |= dict.fromkeys(known[root].unknown(names, text), page)
    unknown = {name: page for name, page in unknown.items() if name not in REPRODUCED}  # By tests/test_symptoms.py.
    assert {name: page for name, page in unknown.items() if name not in ELSEWHERE} == {}, (
        "nothing has these names: correct the document. If one is a command, add its program to RULES in "
        "tests/commands.py; if it is the name of something else, say in ELSEWHERE of what"
    )
    assert ELSEWHERE.keys() - unknown.keys() == set(), "these have got a meaning, or are in no document any more"


def listed_files(text: str) -> list[str]:
    """Return the files and folders in the listings of a document."""
    return re.findall(r"(?<!\S)[\w/]+(?:\.py|\.md|\.sh|/)(?!\S)", "\n".join(fences(text, "")))


FIGURE = re.compile(r"\d+(\.\d+)?(e-?\d+)?( (of|to) \d+.*)?")


def test_each_measured_figure_has_its_command(pages: list[tuple[Path, str, str]]) -> None:
    """In the row, if the table has a column for it, otherwise in the same section. A test file is a command, too."""
    counted = 0
    for _, page, text in pages:
        for section in sections(text):
            for header, *rows in tables(section):
                figures = [row for row in rows if any(map(FIGURE.fullmatch, row))]
                for row in figures:
                    shown = row[header.index("command")] if "command" in header else section
                    assert makes_figures(shown), f"{page} does not say how to get {row}"
                counted += len(figures)
            if re.search(r"^Measured on", section, re.MULTILINE):
                assert makes_figures(section), f"{page} does not say how to measure this:\n{section}"
    assert counted


def makes_figures(text: str) -> bool:
    return bool(commands(text, PROGRAMS)) or bool(re.search(r"`tests/test_\w+\.py`|the same test", text))
