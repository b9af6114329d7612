"""Times rendered projects beside a hand-written loop, Accelerate, Fabric and Lightning, and what surrounds a step.

.venv/bin/python tests/benchmark.py --peers .venv/peers/bin/python --rounds 6 --minutes 60

Each arm of a comparison runs in processes of its own: two ranks, with one thread each. A round has every arm in turn,
and begins with another one than the round before; ratios are taken within a round. Results are appended to a file, by
commit, so that a call that ends after some minutes is followed up by the next; `tests/benchmark_page.py` writes them
into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from conftest import TEMPLATE, isolate
from rendering import Rendering, render

PEERS = TEMPLATE / "tests" / "peers"
RESULTS = TEMPLATE / "benchmark.jsonl"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
# What runs in place of scripts/launch.sh, by the name of the arm.
FILES = {
    "hand-written loop": "by_hand.py",
    "Accelerate": "by_accelerate.py",
    "Fabric": "by_fabric.py",
    "Lightning": "by_lightning.py",
    "no communication": "alone.py",
    "bare": "bare.py",
    "saving": "saving.py",
}
COMPARED = ("project", *list(FILES)[:5])
LARGE = "--model.width 512 --model.layers 8 --model.heads 8 --checkpoint.format sharded".split()


@dataclass(frozen=True)
class Comparison:
    """Arms that train the same experiment for ``steps``, of which the first ``warm_up`` do not count."""

    name: str
    task: str
    steps: int
    warm_up: int
    arms: tuple[str, ...] = COMPARED
    settings: tuple[str, ...] = ()
    rounds: int = 99


COMPARISONS = [
    Comparison("digits", "digits", 130, 30),
    Comparison("digits with BatchNorm", "digits", 130, 30, settings=("--model.norm", "batch")),
    Comparison("language", "language", 60, 10),
    Comparison("bare", "digits", 850, 50, ("bare",)),
    Comparison("saving", "language", 10, 0, ("saving",), tuple(LARGE)),
    Comparison("rendering", "digits", 0, 0, ("one project",)),
    Comparison("rendering all", "digits", 0, 0, ("all projects",), rounds=1),
]


class Lab:
    """The projects, rendered once, and the interpreter that runs all arms."""

    def __init__(self, folder: Path, python: str) -> None:
        self.folder, self.python, self.projects = folder, python, dict[str, Path]()

    def project(self, task: str) -> Path:
        """Return the project of a task, which is rendered by the first call."""
        if task not in self.projects:
            answers = {"task": task, "project_name": f"Bench {task}"}
            self.projects[task] = Path(render(str(self.folder), **answers))
        return self.projects[task]

    def measure(self, arm: str, comparison: Comparison) -> dict[str, float]:
        """Run an arm, and return what it measures."""
        if arm in RENDERING:
            return RENDERING[arm]()
        variables = {"OMP_NUM_THREADS": "1", "NPROC": "2", "PYTHON": self.python, "PYTHONWARNINGS": "ignore"}
        with tempfile.TemporaryDirectory(dir=self.folder) as run_dir:
            first_step, output = execute(
                self.command(arm, comparison, run_dir), os.environ | variables, self.project(comparison.task)
            )
            if arm in ("saving", "bare"):
                return json.loads(output[-1])
            seconds = read_seconds(Path(run_dir)) if arm == "project" else json.loads(output[-1])["seconds"]
        counted = seconds[comparison.warm_up // 10 - 1 :]
        return {"steps_per_second": (comparison.steps - comparison.warm_up) / sum(counted), "first_step": first_step}

    def command(self, arm: str, comparison: Comparison, run_dir: str) -> list[str]:
        """Return the command that starts an arm, without evaluation and checkpoints."""
        project, steps = self.project(comparison.task), str(comparison.steps)
        settings = ["--config", f"{project}/configs/default.yaml", "--run.dir", run_dir, "--train.max_steps", steps]
        settings += ["--train.epochs", "1000", "--train.eval_every", "null", "--checkpoint.every_steps", "null"]
        settings += ["--distributed.device", "cpu", *comparison.settings]
        if arm == "project":
            return [f"{project}/scripts/launch.sh", "train", *settings]
        warm_up = [str(comparison.warm_up)] if arm == "bare" else []
        return [self.python, *TORCHRUN, str(PEERS / FILES[arm]), str(project), *warm_up, *settings]


def execute(words: list[str], environment: dict[str, str], folder: Path) -> tuple[float, list[str]]:
    """Run a command in a folder, where it may leave a cache.

    Returns the seconds until it printed that its first step is done, and the lines it printed.
    """
    start, first_step, output = time.perf_counter(), 0.0, []
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=environment, cwd=folder, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout and process.stderr
        for line in process.stdout:
            if line.startswith("first step"):
                first_step = time.perf_counter() - start
            output.append(line)
        errors = process.stderr.read()
    if process.returncode:
        sys.exit(f"{words}: exit code {process.returncode}\n{''.join(output)}\n{errors}")
    return first_step, output


def read_seconds(run_dir: Path) -> list[float]:
    """Return the seconds between two records of a project; its clock runs on while it logs."""
    batch = yaml.safe_load((run_dir / "config.yaml").read_text())["data"]["global_batch_size"]
    records = [record for record in map(json.loads, (run_dir / "metrics.jsonl").open()) if record["event"] == "train"]
    pairs = itertools.pairwise(records)
    return [(record["step"] - last["step"]) * batch / record["samples_per_second"] for last, record in pairs]


def render_one() -> dict[str, float]:
    """Return the seconds to render one project in a new process, without those to start Python."""
    code = "import time; from cookiecutter.main import cookiecutter; start = time.perf_counter();"
    code += "import sys; cookiecutter(sys.argv[1], no_input=True, output_dir=sys.argv[2]);"
    code += "print(time.perf_counter() - start)"
    with tempfile.TemporaryDirectory() as folder:
        output = subprocess.check_output([sys.executable, "-c", code, str(TEMPLATE), folder], text=True)
    return {"seconds": float(output.splitlines()[-1])}


def render_all() -> dict[str, float]:
    """Return the seconds to render all combinations of answers, as tests/test_render.py does."""
    start = time.perf_counter()
    rendering = Rendering()
    return {"seconds": time.perf_counter() - start, "projects": len(rendering.projects), "files": len(rendering.owners)}


def missing(comparisons: list[Comparison], rounds: int, done: list[dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
    """Yield (comparison, round, arm) for what has no result yet, round by round, each beginning with another arm."""
    seen = {(row["comparison"], row["round"], row["arm"]) for row in done}
    for number in range(rounds):
        for comparison in (each for each in comparisons if number < each.rounds):
            first = number % len(comparison.arms)
            for arm in comparison.arms[first:] + comparison.arms[:first]:
                if (comparison.name, number, arm) not in seen:
                    yield comparison, number, arm


RENDERING = {"one project": render_one, "all projects": render_all}


def read(results: Path, commit: str) -> list[dict[str, Any]]:
    """Return the results of a commit."""
    rows = map(json.loads, results.open()) if results.exists() else ()
    return [row for row in rows if row["commit"] == commit]


def ratios(numerator: dict[int, float], denominator: dict[int, float]) -> list[float]:
    """Return the ratios of what two arms measured, by round, within each round that has both."""
    return [numerator[number] / denominator[number] for number in sorted(numerator.keys() & denominator.keys())]


def find_commit() -> str:
    """Return the commit of the template."""
    return subprocess.check_output(["git", "rev-parse", "--short=10", "HEAD"], cwd=TEMPLATE, text=True).strip()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", default=str(TEMPLATE / ".venv/peers/bin/python"))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--only", choices=[each.name for each in COMPARISONS])
    options = parser.parse_args()
    comparisons = [each for each in COMPARISONS if options.only in (None, each.name)]
    commit, end = find_commit(), time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder, isolate(Path(folder)):
        lab = Lab(Path(folder), options.peers)
        for comparison, number, arm in missing(comparisons, options.rounds, read(RESULTS, commit)):
            if time.monotonic() > end:
                sys.exit("not all rounds are measured; the same command goes on")
            row = {"commit": commit, "comparison": comparison.name, "round": number, "arm": arm}
            row |= lab.measure(arm, comparison)
            with RESULTS.open("a") as results:
                results.write(json.dumps(row) + "\n")
            print(row, flush=True)


if __name__ == "__main__":
    main()
