"""Kills runs at random and starts them again, or counts clean exits: chaos.py --kills 100 --workers 1 --slow.

Every killed run has to end with bitwise the same weights, losses and metrics as one that was left alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from cookiecutter.main import cookiecutter

TEMPLATE = Path(__file__).parents[1]
STEPS = 400
WORDS = [
    *f"train --data.global_batch_size 64 --model.width 8 --model.depth 1 --train.max_steps {STEPS}".split(),
    *"--train.log_every 1 --train.eval_every 20 --checkpoint.every_steps 3 --distributed.device cpu".split(),
]
STRATEGIES = ("ddp", "fsdp", "mesh", "model_parallel", "pipeline", "tensor")
# What Python runs at its start if --slow is given: each file takes up to a second longer to get its name.
SLOW = """
import os, random, time
replace = os.replace
def slow(*words):
    time.sleep(random.uniform(0, 1))
    replace(*words)
os.replace = slow
"""
SIZES = {"pipeline": ["--data.micro_batch_size", "16"], "mesh": ["--parallel.pipeline", "2"]}


def start(project: Path, run: Path, nproc: int, *words: str) -> subprocess.Popen[bytes]:
    """Start a run, in a session of its own."""
    environment = {"NPROC": str(nproc), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(run.parent)}
    command = [str(project / "scripts/launch.sh"), *WORDS, "--run.dir", str(run), *words]
    with open(run.with_suffix(".log"), "ab") as log:
        return subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=log, start_new_session=True)


def family(pid: int) -> list[int]:
    """Return a process and its descendants."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(each for child in children for each in family(int(child)))]


def result(run: Path) -> tuple[Any, Any]:
    """Return the weights of a run, and its records without what was measured."""
    newest = sorted((run / "checkpoints").glob("*.pt"))[-1]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        for name in ("samples_per_second", "seconds_per_step"):
            record.pop(name, None)
    return torch.load(newest, weights_only=True)["model"], records


def wait(launcher: subprocess.Popen[bytes], records: Path) -> None:
    """Wait for a moment of the start, or until some more records are written."""
    if random.random() < 0.3:
        return time.sleep(random.uniform(0, 6))
    size = records.stat().st_size if records.exists() else 0
    target = size + random.randrange(1, 10_000)  # Up to 60 records.
    while launcher.poll() is None and not (records.exists() and records.stat().st_size >= target):
        time.sleep(0.001)
    time.sleep(random.uniform(0, 0.05))


def kill(project: Path, folder: Path, nproc: int, kills: int, *words: str) -> tuple[int, int, float]:
    """Kill a run some times until it ends; returns how often, how often wrongly, and the longest end in seconds."""
    whole, run, done, longest = folder / "whole", folder / "killed", 0, 0.0
    if not whole.exists():
        assert start(project, whole, nproc, *words).wait() == 0
    while True:
        launcher = start(project, run, nproc, *words)
        if done < kills:
            wait(launcher, run / "metrics.jsonl")
            members = family(launcher.pid)
            targets = random.choice([members, members[:1], members[-1:]])
            if launcher.poll() is None:
                done += 1
                for pid in targets:
                    os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        code = launcher.wait(timeout=180)
        if code == 0:
            break
        assert done, run.with_suffix(".log").read_text()
        while any(Path(f"/proc/{pid}").exists() for pid in members):
            time.sleep(0.1)
        longest = max(longest, time.monotonic() - killed)
    (weights, records), (expected, theirs) = result(run), result(whole)
    wrong = records != theirs or any(not torch.equal(weights[name], expected[name]) for name in expected)
    return done, int(wrong), longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--exits", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0, help="loader processes of each rank")
    parser.add_argument("--slow", action="store_true", help="writes take longer")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    done, exits = 0, 0
    with TemporaryDirectory() as scratch:
        for number in range(10**6):
            if done >= options.kills and exits >= options.exits:
                break
            turn, place = divmod(number, len(STRATEGIES))
            strategy, launcher = STRATEGIES[place], ("torchrun", "spawn")[turn % 2]
            answers = {"parallelism": strategy, "launcher": launcher, "project_name": f"{strategy} {launcher}"}
            folder = Path(scratch, f"{strategy}-{launcher}-{number}")
            project = Path(scratch, "projects", f"{strategy}-{launcher}".replace("_", "-"))
            if not project.exists():
                cookiecutter(str(TEMPLATE), no_input=True, extra_context=answers, output_dir=str(project.parent))
            folder.mkdir()
            (folder / "sitecustomize.py").write_text(SLOW * options.slow)
            # Of five, which shares no factor with the strategies, so that each has both.
            nproc, words = (4 if number % 5 > 2 else 2), ["--data.num_workers", str(options.workers)]
            words += SIZES.get(strategy, [])
            if done < options.kills:
                killed, wrong, longest = kill(project, folder, nproc, 8, *words)
                done += killed
                text = f"{killed} kills, {wrong} wrong, the longest end {longest:.1f} s; {done} in all"
                print(f"{strategy} {launcher} {nproc} ranks: {text}", flush=True)
            for _ in range(min(10, options.exits - exits)):
                run = folder / f"exit{exits}"
                code = start(project, run, nproc, *words, "--train.max_steps", "2").wait()
                exits += 1
                assert code == 0, (code, run.with_suffix(".log").read_text())
            if options.exits:
                print(f"{strategy} {launcher} {nproc} ranks: {exits} clean exits", flush=True)


if __name__ == "__main__":
    main()
