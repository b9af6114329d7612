"""What every strategy gives on this machine's accelerators, as a table; ends with 1 if a cell is wrong.

`make test-gpu` runs it with the PyTorch that is there; DEVICE=cpu tries it on a CPU. The plain loop is the oracle of
tests/runs/numbers, in float64 on the CPU.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from signal import SIGTERM
from tempfile import mkdtemp
from typing import Any

import torch
from conftest import CHOICES, edit, launch, launch_and_kill, read_records, render, started, wait_until
from test_parity import TASKS, arguments, expected, last_step, refused

DEVICE = os.environ.get("DEVICE", "auto")
COUNT = torch.accelerator.device_count() if DEVICE == "auto" else 2
RANKS = 4 if COUNT >= 4 else min(COUNT, 2)
AT_ONCE = max(1, min(6, (os.cpu_count() or 1) // 2))  # Runs at a time; they share the devices.
# How each cell of a row changes the run, and how far its losses may be from the plain loop's, relative to them.
VARIANTS: dict[str, tuple[dict[str, Any], float]] = {
    "fp32": ({}, 1e-5),
    "compiled": ({"train.compile": True}, 1e-5),
    "recomputed": ({"train.activation_checkpointing": True}, 1e-5),
    "bf16": ({"train.precision": "bf16"}, 5e-3),
    "fp16": ({"train.precision": "fp16"}, 1e-3),
}
REFUSED = {("data_parallel", "compiled"), ("data_parallel", "recomputed")}
REFUSED |= {(strategy, "fp16") for strategy in ("pipeline", "tensor", "mesh")}
# Settings that save often enough to be slow, so that a run can be ended in the middle.
LONG = (
    "--data.global_batch_size 8 --train.max_steps 200 --train.epochs 9 --train.log_every 1 --checkpoint.every_steps 3"
)
os.environ |= {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}  # For the launchers.
SCRATCH = Path(mkdtemp(prefix="agree"))


def layout(parallelism: str) -> tuple[int, list[str]]:
    """Return how many ranks of a strategy use this machine's devices, and its settings."""
    if parallelism == "model_parallel":  # On one device, that holds both parts.
        return max(1, RANKS // 2), ["--parallel.devices", str(min(2, COUNT))]
    if parallelism == "mesh" and RANKS == 4:
        return RANKS, ["--parallel.pipeline", "2", "--parallel.tensor", "2"]
    return (1 if parallelism == "data_parallel" else RANKS), []


def attempt(check: Callable[..., str], *arguments: Any) -> str:
    """Return what a check gives, or the last line of why it failed, crossed."""
    try:
        return check(*arguments)
    except Exception as error:  # One row must not cost the others.
        lines = str(error).splitlines() or [type(error).__name__]
        return f"✗ {([line for line in lines if line.startswith('error: ')] or lines)[-1]}"


def compare(project: Path, task: str, nproc: int, words: list[str], variant: str, code: int = 0) -> str:
    """Train as the plain loop does; return the largest relative difference of a loss, crossed if it is too large."""
    changes, limit = VARIANTS[variant]
    folder = project / f"{variant}-{task}-{nproc}"
    words = ["train", *arguments(task, **changes, **{"distributed.device": DEVICE}), *words, "--run.dir", str(folder)]
    launch(project, *words, nproc=nproc, code=code)
    if code:
        return "refused"
    ours, theirs = read_records(folder, "train"), expected(project, task).records
    differences = [abs(a["loss"] / b["loss"] - 1) for a, b in zip(ours, theirs, strict=True)]
    return f"{'' if max(differences) <= limit else '✗ '}{max(differences):.1e}"


def interrupt(project: Path, nproc: int, words: list[str]) -> str:
    """End a run by SIGKILL, then by SIGTERM; return whether it ends with the weights of one that was left alone."""
    whole, parts = project / "whole", project / "parts"
    words = ["train", *LONG.split(), "--distributed.device", DEVICE, *words, "--run.dir"]
    launch(project, *words, whole, nproc=nproc)
    launch_and_kill(project, *words, parts, when=lambda: last_step(parts) >= 7, nproc=nproc, seconds=240)
    with started(project / "scripts" / "launch.sh", *words, parts, cwd=project, NPROC=str(nproc)) as launcher:
        wait_until(lambda: last_step(parts) >= 20, "a signal can be sent", 240)
        launcher.terminate()
        launcher.communicate(timeout=120)
    if launcher.returncode != 128 + SIGTERM:
        return f"✗ exit code {launcher.returncode} after SIGTERM"
    launch(project, *words, parts, nproc=nproc)
    first, second = (
        torch.load(sorted((f / "checkpoints").glob("*.pt"))[-1], weights_only=True) for f in (whole, parts)
    )
    different = [name for name, value in first["model"].items() if not torch.equal(value, second["model"][name])]
    return f"✗ {len(different)} tensors differ" if different else "bitwise"


def evaluate(project: Path, nproc: int, words: list[str]) -> str:
    """Return by how much the metrics of the last checkpoint differ between these devices and the CPU."""
    newest = sorted((project / "whole" / "checkpoints").glob("*.pt"))[-1]
    losses = []
    for device in (DEVICE, "cpu"):
        command = ["evaluate", "--checkpoint", str(newest), "--distributed.device", device, *words]
        losses.append(json.loads(launch(project, *command, nproc=nproc).stdout.splitlines()[-1])["loss"])
    difference = abs(losses[0] / losses[1] - 1)
    return f"{'' if difference <= 1e-5 else '✗ '}{difference:.1e}"


def hang(project: Path) -> str:
    """Return whether a rank that hangs is named, and in how many lines."""
    edit(project, {("train.py", "        self.optimizer.zero_grad()\n"): HANGS})
    words = ["train", *LONG.split(), "--distributed.device", DEVICE, "--distributed.timeout_seconds", "30"]
    with started(project / "scripts" / "launch.sh", *words, cwd=project, NPROC=str(RANKS)) as launcher:
        lines = [line for line in launcher.communicate(timeout=200)[1].splitlines() if line.startswith("error: ")]
    named = [line for line in lines if "no report from rank(s) 1" in line]
    return f"named in {len(lines)} lines" if named and launcher.returncode == 1 else f"✗ {lines}"


HANGS = """        self.optimizer.zero_grad()
        if self.step == 5 and self.process.rank == 1:
            time.sleep(10000)
"""


def main() -> None:
    start, rows = time.time(), dict[str, dict[str, Any]]()
    name = torch.cuda.get_device_name() if DEVICE == "auto" and torch.cuda.is_available() else DEVICE
    print(f"{COUNT} x {name}, PyTorch {torch.__version__}, Python {platform.python_version()}\n", flush=True)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for task in TASKS:
            for parallelism in CHOICES["parallelism"]:
                if parallelism in refused(task):
                    continue
                nproc, words = layout(parallelism)
                project = render(SCRATCH / task / parallelism, hooks=False, parallelism=parallelism, task=task)
                expected(project, task)  # Once, before threads ask for it.
                row = rows[f"{parallelism}, {task}, {nproc} rank(s)"] = {}
                for variant in VARIANTS:
                    code = 2 if (parallelism, variant) in REFUSED else 0
                    row[variant] = pool.submit(attempt, compare, project, task, nproc, words, variant, code)
                if task == "language" and parallelism != "data_parallel":
                    row["resumed"] = pool.submit(attempt, interrupt, project, nproc, words)
                if parallelism == "ddp" and COUNT == 1:  # Which share the device.
                    shared = rows[f"ddp, {task}, 2 ranks on one device (gloo)"] = {}
                    shared["fp32"] = pool.submit(
                        attempt, compare, project, task, 2, ["--distributed.backend", "gloo"], "fp32"
                    )
        if RANKS > 1:
            for parallelism in ("ddp", "fsdp"):
                project = render(SCRATCH / "hang" / parallelism, hooks=False, parallelism=parallelism)
                rows[f"{parallelism}, a rank hangs"] = {"resumed": pool.submit(attempt, hang, project)}
        done = {row: {column: cell.result() for column, cell in cells.items()} for row, cells in rows.items()}
        evaluated = {}
        for row, cells in done.items():
            if cells.get("resumed") == "bitwise":
                parallelism = row.split(",")[0]
                project = SCRATCH / "language" / parallelism / "my-experiment"
                evaluated[row] = pool.submit(attempt, evaluate, project, *layout(parallelism))
        for row, cell in evaluated.items():
            done[row]["evaluated"] = cell.result()
    columns = [*VARIANTS, "resumed", "evaluated"]
    print("|", *(f" | {column}" for column in columns), "|\n|" + " --- |" * (len(columns) + 1), sep="")
    for row, cells in done.items():
        print(f"| {row} |", *(f"{cells.get(column, '')} |" for column in columns))
    wrong = [cell for cells in done.values() for cell in cells.values() if cell.startswith("✗")]
    print(f"\n{len(wrong)} cell(s) are wrong; {time.time() - start:.0f} s")
    shutil.rmtree(SCRATCH)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
