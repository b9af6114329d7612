"""Kills runs at a step and in a phase, by every launcher and under every strategy, and compares what they end with.

    python tests/chaos.py --kills 200 --seed 0

A run is started, killed, and started again by the same command, a dozen times, until it is done. Then its records and
its weights have to be bitwise those of a run that nobody disturbed, and after each kill nothing may be left.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from conftest import CHOICES, TEMPLATE, check_answers, isolate
from cookiecutter.main import cookiecutter
from faults import MAIN_PHASES, PHASES, Fault
from runs import alone, assert_close, assert_same_weights, edit, find_marked_processes, plant, started, world_size

# From the fault until the last process is gone, in seconds: far more than any machine should need.
LIMIT = 60.0
KILLS = ("kill rank", "kill all", "kill launcher")
ENDS, SILENT = r"rank {rank} \(process \d+\) was ended by ", r"no report from rank {rank}\b"
# What has to be printed, as regular expressions; the second of a pair only if there are other ranks.
MESSAGES = {
    "kill rank": (ENDS + "SIGKILL", SILENT),
    "kill all": (r"rank \d \(process \d+\) was ended by SIGKILL",),
    "kill launcher": (),  # Nobody is left who could print.
    "stop": (r"rank {rank} \(process \d+\) still ran after \d+ s: SIGKILL", SILENT),
    "segmentation fault": (ENDS + "SIGSEGV", SILENT),
    "interpreter kept": (r"rank {rank} \(process \d+\) still ran after \d+ s: SIGKILL", SILENT),
    "out of memory": (r"rank {rank}\b.* out of memory after step \d+|out of memory after step \d+",),
    "disk full": (r"^error: .*No space left on device: '{run}",),
    "disk read-only": (r"^error: .*Read-only file system: '{run}",),
    "disk gone": (r"^error: {run} was deleted or replaced during the run",),
    "clock on": (r"step \d+ of ",),
    "clock back": (r"step \d+ of ",),
}
SURVIVED = ("clock on", "clock back")  # The run goes on as if nothing had happened.
MEASURED = {"samples_per_second", "memory_mib", "peak_memory_mib", "slowest_rank", "behind_ms"}
PYTORCH_CACHE = "torchinductor_"  # All runs of a user share this folder.
CYCLE = ("ddp", "fsdp", "pipeline", "ddp", "tensor", "model_parallel", "ddp", "data_parallel")
# As root, a run has a /dev/shm of its own, in which what it leaves can be told from what others do.
ALONE = ["unshare", "-m", "sh", "-c", 'mount --bind "$TMPDIR/../shm" /dev/shm && exec "$@"', "alone"]


class Projects:
    """Rendered projects that hold the faults, and the folders of their undisturbed runs."""

    def __init__(self, folder: Path, break_it: Callable[[Path], object] = lambda project: None) -> None:
        self.folder, self.break_it, self.references = folder, break_it, dict[Any, Path]()

    def render(self, strategy: str, launcher: str) -> Path:
        """Return a project, whose model has the dropout of the variable DROPOUT: it needs its random states."""
        answers = {"parallelism": strategy, "launcher": launcher}
        check_answers(answers)
        output = self.folder / f"{strategy}-{launcher}"
        if output.exists():
            return next(output.iterdir())
        project = Path(cookiecutter(str(TEMPLATE), no_input=True, extra_context=answers, output_dir=str(output)))
        arm = f"sys.path.append({str(TEMPLATE / 'tests')!r})\nimport faults\nfaults.arm(__package__)"
        plant(project, "__main__.py", "    gc.freeze()\n", arm)
        dropped = 'F.dropout(features.mean(dim=(2, 3)), float(__import__("os").environ["DROPOUT"]), self.training)'
        edit(project, "model.py", "self.linear(features.mean(dim=(2, 3)))", f"self.linear({dropped})")
        self.break_it(project)
        return project


@dataclass
class Outcome:
    """What a fault did: what was wrong, by what is checked; nothing if all is well."""

    fault: Fault
    strategy: str
    seconds: float | None = None  # From the fault to the end of the last process.
    wrong: dict[str, str] = field(default_factory=dict)


@dataclass
class Chain:
    """A run that has one fault after another; the ``step`` of each is counted from the newest checkpoint."""

    strategy: str
    launcher: str
    faults: list[Fault]
    dropout: float = 0.0
    workers: int = 0
    form: str = "full"
    timeout: float = 60.0
    environment: dict[str, str] = field(default_factory=dict)

    def begin(self, projects: Projects, number: int) -> None:
        """Render the project, and let it run undisturbed, unless another chain has done that."""
        self.projects, self.project = projects, projects.render(self.strategy, self.launcher)
        self.folder, self.nproc = projects.folder / f"chain-{number}", world_size(self.strategy)
        self.run = self.folder / "disk" / "run"
        self.run.parent.mkdir(parents=True, exist_ok=True)  # A test may have mounted it.
        self.steps = 5 * len(self.faults) + 6  # A fault moves the run on by five steps at most.
        key = self.strategy, self.launcher, self.steps, self.dropout, self.form
        if key not in projects.references:
            projects.references[key] = self.folder / "reference"
            self.finish(projects.references[key])
        self.reference = projects.references[key]

    def words(self, run: Path) -> list[str | Path]:
        """Return the arguments of the launcher's script; each start of a run has the same ones."""
        return [
            *("train", "--run.dir", run, "--distributed.device", "cpu", "--data.global_batch_size", "48"),
            *("--model.width", "8", "--train.max_steps", str(self.steps), "--train.log_every", "1"),
            *("--train.eval_every", "3", "--checkpoint.every_steps", "2", "--checkpoint.format", self.form),
            *("--data.num_workers", str(self.workers), "--distributed.timeout_seconds", str(self.timeout)),
            *("--distributed.startup_timeout_seconds", "120"),
        ]

    @contextmanager
    def launched(self, folder: Path, run: Path, project: Path, nproc: int, fault: str = "") -> Iterator[Any]:
        """Start a run, with temporary files, shared memory and log in ``folder``."""
        for name in ("tmp", "shm"):
            (folder / name).mkdir(parents=True)
        environment = {"NPROC": str(nproc), "MARK": str(folder), "TMPDIR": f"{folder}/tmp", "STOP_SECONDS": "20"}
        environment |= {"DROPOUT": str(self.dropout), "OMP_NUM_THREADS": "1"} | ({"FAULT": fault} if fault else {})
        command = [*(ALONE if os.geteuid() == 0 else []), project / "scripts/launch.sh", *self.words(run)]
        with started(
            *command, cwd=project, log=folder / "log", **environment | (self.environment if fault else {})
        ) as process:
            yield process

    def finish(self, run: Path, project: Path | None = None, nproc: int | None = None) -> None:
        """Let a run end by itself; fails if it does not."""
        folder = run.with_name(f"{run.name}-end")
        with self.launched(folder, run, project or self.project, nproc or self.nproc) as process:
            assert process.wait(600) == 0, (folder / "log").read_text()
        for path in (run / "checkpoints").glob(f"*{self.steps:08d}.dcp"):
            alone(project or self.project, "convert", "--checkpoint", path, "--output", path.with_suffix(".pt"))

    def inject(self, number: int, fault: Fault) -> Outcome:
        """Start the run with a fault, and look at how it ends and what it leaves."""
        folder = self.folder / f"{number:02d} {fault.phase}, {fault.kind}".replace(" ", "-")
        newest = max(
            [int(path.stem[5:]) for path in self.run.glob("checkpoints/step-*") if path.suffix != ".tmp"] or [0]
        )
        fault = replace(fault, step=newest + fault.step, folder=str(folder), run=str(self.run))
        outcome = Outcome(fault, self.strategy)
        with self.launched(folder, self.run, self.project, self.nproc, json.dumps(asdict(fault))) as process:
            while (code := process.poll()) is None or find_marked_processes(str(folder)):
                fired = read(folder / "fired")
                if time.monotonic() > (float(fired) if fired else time.monotonic()) + LIMIT:
                    break
                time.sleep(0.05)
            ended = time.monotonic()
            left = [f"process {pid}" for pid in find_marked_processes(str(folder))]
        wrong, log, fired = outcome.wrong, read(folder / "log"), read(folder / "fired")
        if not fired:
            return replace(outcome, wrong={"fired": f"{folder}: never came to the fault\n{log}"})
        outcome.seconds = ended - float(fired)
        goes_on = fault.kind in SURVIVED or bool(self.environment.get("MAX_RESTARTS"))
        if left or (code == 0) != goes_on:
            wrong["ended"] = f"{folder}: exit code {code} after {outcome.seconds:.0f} s\n{log}"
        expected = MESSAGES[fault.kind][: None if self.nproc > 1 else 1]
        parts = {"rank": fault.rank, "run": re.escape(str(self.run))}
        for message in expected if not goes_on or fault.kind in SURVIVED else ():
            if not re.search(message.format(**parts), log, re.MULTILINE):
                wrong["named"] = f"{folder}: no {message.format(**parts)}\n{log}"
        files = [*(folder / "tmp").iterdir(), *(folder / "shm").iterdir()]
        left += [str(path) for path in files if not path.name.startswith(PYTORCH_CACHE)]
        if left:
            wrong["clean"] = f"{folder} leaves {left}"
        (self.run.parent / "ballast").unlink(missing_ok=True)
        return outcome

    def play(self, projects: Projects, number: int = 0) -> list[Outcome]:
        """Run the chain, and compare its end with that of the undisturbed run, and that of other layouts with both."""
        self.begin(projects, number)
        outcomes = [self.inject(count, fault) for count, fault in enumerate(self.faults)]
        checks: dict[str, Callable[[], None]] = {"resumed": self.check_same}
        if not self.dropout and self.nproc > 1:  # Which masks are drawn depends on the layout.
            checks["other"] = self.check_other
        shutil.copytree(self.run, self.folder / "other")
        shutil.copytree(self.run, self.folder / "ranks")
        for name, check in checks.items():
            try:
                check()
            except AssertionError as error:
                for outcome in outcomes:
                    outcome.wrong[name] = f"{self.folder}: {error}"
        return outcomes

    def check_same(self) -> None:
        """Finish the run, and check that it ends bitwise as the undisturbed one, without temporary files."""
        self.finish(self.run)
        records, expected = ([*map(comparable, lines(run))] for run in (self.run, self.reference))
        assert records == expected, "the metrics differ"
        assert_same_weights(self.run, self.reference)
        assert not (left := [*self.run.rglob("*.tmp")]), f"left: {left}"

    def check_other(self) -> None:
        """Finish copies of the run on another number of ranks and under another strategy; check both to rounding."""
        other = self.projects.render("fsdp" if self.strategy == "ddp" else "ddp", self.launcher)
        nproc = 1 if self.strategy in ("tensor", "pipeline") else 3
        for name, project, ranks in (("ranks", self.project, nproc), ("other", other, self.nproc)):
            self.finish(self.folder / name, project, ranks)
            assert_close(self.folder / name, self.reference)


def read(path: Path) -> str:
    """Return the content of a file, or nothing if there is none."""
    return path.read_text() if path.exists() else ""


def lines(run: Path) -> list[dict[str, Any]]:
    """Return all records of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def comparable(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record without what is measured."""
    return {key: value for key, value in record.items() if key not in MEASURED}


def plan(kills: int, seed: int, length: int = 12) -> Iterator[Chain]:
    """Yield chains with so many kills in all; every strategy has every kind in every phase, as far as they suffice."""
    draw, left = random.Random(seed), kills
    cases: dict[str, Iterator[tuple[str, str]]] = {}
    for strategy in CYCLE:
        pairs = list(itertools.product(KILLS, PHASES))
        draw.shuffle(pairs)
        cases.setdefault(strategy, itertools.cycle(pairs))
    counts = dict.fromkeys(CYCLE, 0)
    for number, strategy in enumerate(itertools.cycle(CYCLE)):
        if left <= 0:
            return
        faults = []
        for kind, phase in itertools.islice(cases[strategy], min(length, left)):
            rank = 0 if phase in MAIN_PHASES else draw.randrange(world_size(strategy))
            faults.append(Fault(kind, phase, rank, draw.randint(1, 3)))
        launcher = CHOICES["launcher"][counts[strategy] % 2]
        counts[strategy] += 1
        left -= len(faults)
        form = "sharded" if number % 4 == 1 else "full"
        yield Chain(strategy, launcher, faults, 0.1 * (number % 2), int(number % 5 == 4), form)


def table(outcomes: Iterable[Outcome]) -> str:
    """Return the outcomes as a table: how many of the faults of each kind, strategy and phase passed each check."""
    everything = list(outcomes)
    columns = ("fired", "ended", "named", "clean", "resumed", "other")
    rows = [f"{'':20}{'faults':>9}" + "".join(f"{column:>9}" for column in columns) + "   median s    max s"]
    groups = {"all": everything}
    for of in (lambda o: o.fault.kind, lambda o: o.strategy, lambda o: o.fault.phase):
        for name in dict.fromkeys(map(of, everything)):
            groups[name] = [outcome for outcome in everything if of(outcome) == name]
    for name, group in groups.items():
        passed = [sum(column not in outcome.wrong for outcome in group) for column in columns]
        seconds = [outcome.seconds for outcome in group if outcome.seconds is not None] or [0.0]
        figures = "".join(f"{number:9}" for number in (len(group), *passed))
        rows.append(f"{name:20}{figures}{statistics.median(seconds):11.1f}{max(seconds):9.1f}")
    return "\n".join(rows)


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount a disk of 3 MiB at a folder for the duration of a ``with`` block."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    outcomes: list[Outcome] = []
    with isolate(folder):
        projects = Projects(folder)
        for number, chain in enumerate(plan(options.kills, options.seed)):
            outcomes += (new := chain.play(projects, number))
            wrong = {text for outcome in new for text in outcome.wrong.values()}
            print(f"{chain.strategy}, {chain.launcher}: {len(new)} faults, {len(wrong)} wrong", flush=True)
            print(*wrong, sep="\n", end="\n" if wrong else "", flush=True)
    print(table(outcomes))
    if any(outcome.wrong for outcome in outcomes):
        sys.exit(f"error: something is wrong; see {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
