"""The recipe of a sweep, as written: one run after the other, as an array of jobs, and a search with Optuna."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from conftest import Bake, run
from documents import fences
from recipes import apply
from runs import checkpoints, find_marked_processes, kill_all, last_step, records, started, wait_until
from slurm import MISSING, start_slurm
from test_teaching import page, shell

SMALL = """
train: {max_steps: 12, log_every: 1, eval_every: 4}
checkpoint: {every_steps: 2}
distributed: {device: cpu}
"""
DIRECTORIES = ["lr1e-3", "lr2e-3", "lr4e-3", "lr4e-3-decay"]


def prepare(project: Path) -> list[str]:
    """Make the default experiment a short one, write the files of the page, and return its commands."""
    (project / "configs/default.yaml").write_text(SMALL)
    text = page(project, "sweep")
    (project / "sweep.txt").write_text(fences(text, "text")[0])
    (project / "search.py").write_text(fences(text, "python")[0])
    return fences(text, "bash")


def stub(folder: Path, name: str, line: str) -> None:
    """Write a program of one line."""
    (folder / name).write_text(f"#!/bin/sh\n{line}\n")
    (folder / name).chmod(0o755)


def test_each_job_of_an_array_takes_its_line(bake: Bake, tmp_path: Path) -> None:
    """Without Slurm: its programs only print what they were given."""
    project = bake(cluster="slurm")
    prepare(project)
    (project / "sweep.txt").write_text("--run.dir runs/a\n--run.dir 'runs/b c' --optim.betas '[0.8, 0.9]'\n")
    stub(tmp_path, "srun", "printf '<%s>' \"$@\"")
    stub(tmp_path, "scontrol", "echo host")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "host", "SLURM_ARRAY_TASK_ID": "2"}
    path = f"{tmp_path}:{os.environ['PATH']}"
    words = ("bash", "scripts/train.sbatch", "train", "--config", "configs/default.yaml")
    printed = run(*words, cwd=project, PATH=path, SWEEP="sweep.txt", **job).stdout
    given = re.findall(r"<([^>]*)>", printed)
    assert given[given.index("train") :] == [
        *("train", "--config", "configs/default.yaml"),
        *("--run.dir", "runs/b c", "--optim.betas", "[0.8, 0.9]"),
    ]


@pytest.mark.slow
def test_a_sweep_that_was_killed_resumes(bake: Bake, tmp_path: Path) -> None:
    project = bake()
    command = prepare(project)[0]
    second, mark = project / "runs/sweep/lr2e-3", str(tmp_path)
    with started("bash", "-c", command, cwd=project, log=tmp_path / "log", NPROC="1", MARK=mark) as sweep:
        wait_until(lambda: last_step(second) >= 3, "the second run has begun", 240)
        kill_all(sweep, mark)
        wait_until(lambda: not find_marked_processes(mark), "all have ended", 30)
    complete, killed = ((project / "runs/sweep" / name / "metrics.jsonl").read_text() for name in DIRECTORIES[:2])
    output = shell(project, f"export NPROC=1\n{command}")
    starts = [int(step) for step in re.findall(r"runs/sweep/\S+: step (\d+) of 12", output)]
    assert starts[0] == 12 and 0 < starts[1] < 12 and starts[2:] == [0, 0], output
    assert (project / "runs/sweep/lr1e-3/metrics.jsonl").read_text() == complete
    assert killed.splitlines()[0] in (second / "metrics.jsonl").read_text()
    rates = [records(project / "runs/sweep" / name, "train")[-1]["lr"] for name in DIRECTORIES]
    assert rates[1] == pytest.approx(2 * rates[0]) and rates[2] == pytest.approx(4 * rates[0])
    best = shell(project, next(block for block in fences(page(project, "sweep"), "bash") if "glob" in block))
    assert [line.split()[1] for line in best.splitlines()] == DIRECTORIES


@pytest.mark.slow
@pytest.mark.weekly
@pytest.mark.parametrize("task", ["digits", "control"])
def test_a_search_that_was_killed_continues(bake: Bake, tmp_path: Path, task: str) -> None:
    pytest.importorskip("optuna")
    project = bake(task=task)
    prepare(project)
    script, mark = project / "search.py", str(tmp_path)
    script.write_text(script.read_text().replace("TRIALS, FOLDER = 20", "TRIALS, FOLDER = 3"))
    with started(sys.executable, "search.py", cwd=project, log=tmp_path / "log", NPROC="1", MARK=mark) as search:
        wait_until(lambda: any(last_step(run) >= 3 for run in project.glob("runs/search/*")), "a run has begun", 240)
        kill_all(search, mark)
        wait_until(lambda: not find_marked_processes(mark), "all have ended", 30)
    (interrupted,) = (path.parent for path in project.glob("runs/search/*/metrics.jsonl"))
    output = shell(project, "export NPROC=1\n.venv/bin/python search.py")
    assert re.search(rf"{interrupted.name}: step [1-9]\d* of 12", output), output
    runs = [path.parent for path in project.glob("runs/search/*/metrics.jsonl")]
    assert len(runs) == 3 and "best: " in output
    assert "step-00000012.pt" in checkpoints(interrupted)


@pytest.mark.slow
@pytest.mark.weekly
@pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)} here: apt-get install slurm-wlm munge")
def test_a_sweep_as_an_array_of_jobs(bake: Bake) -> None:
    project = bake(cluster="slurm")
    (command,) = [block for block in prepare(project) if "sbatch" in block]
    with start_slurm() as slurm:
        words = command.strip().replace("SWEEP=sweep.txt sbatch", "sbatch --parsable --gpus-per-node=0").split()
        environment = {"NPROC": "1", "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "PYTHONPATH": "src"}
        job = slurm.command(*words, cwd=project, SWEEP="sweep.txt", **environment)
        for number in range(1, 5):
            assert slurm.wait(f"{job}_{number}")["ExitCode"] == "0:0"
    assert [checkpoints(project / "runs/sweep" / name)[-1] for name in DIRECTORIES] == 4 * ["step-00000012.pt"]


def test_the_files_of_the_page_are_complete(bake: Bake) -> None:
    """The recipe applies as other recipes do, and its script passes the project's linter."""
    project = bake()
    edits = apply(project / "docs/sweep.md", project)
    assert [edit.path for edit in edits] == ["sweep.txt", "search.py"]
    run(sys.executable, "-m", "ruff", "check", "--no-cache", "search.py", cwd=project)
