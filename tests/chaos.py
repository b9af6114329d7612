"""Faults of every kind, under every strategy and launcher: what a run leaves, and whether it resumes bitwise.

    python tests/chaos.py --kills 200 --seed 0 --others
    python tests/chaos.py --exits 500

A run is started, killed, and started again by the same command, a dozen times, until it is done. Then its records and
its weights have to be bitwise those of a run that nobody disturbed, and after each kill nothing may be left: no
process, and with it no port, no temporary file, no shared memory. A run that nobody disturbs has to exit with 0, every
time, and to leave nothing either.
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
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from conftest import CHOICES, TEMPLATE, check_answers, isolate
from cookiecutter.main import cookiecutter
from faults import MAIN_PHASES, PHASES, Fault
from runs import (
    alone,
    assert_close,
    assert_same_weights,
    edit,
    find_marked_processes,
    plant,
    small_disk,
    started,
    world_size,
)

LIMIT = 60.0  # From a fault until the last process is gone, in seconds: far more than any machine should need.
KILLS = ("kill rank", "kill all", "kill launcher")
ENDED, SILENT = r"rank {rank} \(process \d+\) was ended by ", r"no report from rank {rank}\b"
HANGS = r"rank {rank} \(process \d+\) still ran after \d+ s: SIGKILL"
# What has to be printed, as regular expressions; the second one only if there are other ranks.
MESSAGES = {
    "kill rank": (ENDED + "SIGKILL", SILENT),
    "kill all": (r"rank \d \(process \d+\) was ended by SIGKILL",),
    "kill launcher": (),  # Nobody is left who could print.
    "stop": (HANGS, SILENT),
    "segmentation fault": (ENDED + "SIGSEGV", SILENT),
    "interpreter kept": (HANGS, SILENT),
    "out of memory": (r"out of memory after step \d+: .*rank {rank} holds", r"^error: .*rank {rank} failed at "),
    "disk full": (r"^error: .*No space left on device: '{run}",),
    "disk read-only": (r"^error: .*Read-only file system: '{run}",),
    "disk gone": (r"^error: {run} was deleted or replaced during the run",),
}
# The run goes on as if nothing had happened.
SURVIVED = ("clock jumps",)
MEASURED = {"samples_per_second", "tokens_per_second", "memory_mib", "peak_memory_mib", "slowest_rank", "behind_ms"}
PYTORCH_CACHE = "torchinductor_"  # All runs of a user share this folder.
# As root, a run has a /dev/shm of its own, which holds what it leaves and nothing else.
OWN_SHM = ["unshare", "-m", "sh", "-c", 'mount --bind "$TMPDIR/../shm" /dev/shm && exec "$@"', "own-shm"]
CYCLE = ("ddp", "fsdp", "pipeline", "ddp", "tensor", "model_parallel", "ddp", "data_parallel")


class Projects:
    """Rendered projects into which faults are planted, and undisturbed runs of them; ``spoil`` edits each project."""

    def __init__(self, folder: Path, spoil: Callable[[Path], object] = lambda project: None) -> None:
        self.folder, self.spoil, self.references, self.numbers = folder, spoil, dict[Any, Path](), itertools.count()

    def render(self, strategy: str, launcher: str) -> Path:
        """Return a project; its model has the dropout of the variable DROPOUT, for which it needs random states."""
        output, answers = self.folder / f"{strategy}-{launcher}", {"parallelism": strategy, "launcher": launcher}
        if output.exists():
            return next(output.iterdir())
        check_answers(answers)
        # The hook would print what to do next.
        options = {"no_input": True, "accept_hooks": False, "output_dir": str(output)}
        project = Path(cookiecutter(str(TEMPLATE), extra_context=answers, **options))
        arm = f"sys.path.append({str(TEMPLATE / 'tests')!r})\nimport faults\nfaults.arm(__package__)"
        plant(project, "__main__.py", "    gc.freeze()\n", arm)
        dropped = 'F.dropout(features.mean(dim=(2, 3)), float(__import__("os").environ["DROPOUT"]), self.training)'
        edit(project, "model.py", "self.linear(features.mean(dim=(2, 3)))", f"self.linear({dropped})")
        self.spoil(project)
        return project


@dataclass
class Outcome:
    """What came of a fault: the seconds from it to the end of the last process, and what each check found wrong."""

    fault: Fault
    strategy: str
    seconds: float = 0.0
    checks: dict[str, str] = field(default_factory=dict)

    @property
    def wrong(self) -> dict[str, str]:
        """Return what is wrong, without the checks that found nothing."""
        return {name: text for name, text in self.checks.items() if text}


@dataclass
class Chain:
    """A run that has one fault after another; the ``step`` of each is counted from the newest checkpoint."""

    strategy: str
    launcher: str
    faults: list[Fault]
    dropout: float = 0.0
    workers: int = 0
    form: str = "full"
    timeout: int = 60
    restarts: int = 0  # By torchrun, which goes on after a fault.

    def play(self, projects: Projects) -> list[Outcome]:
        """Run it, and compare its end with that of an undisturbed run; so too on other ranks, by another strategy."""
        self.set_up(projects, steps=5 * len(self.faults) + 6)  # A fault moves the run on by five steps at most.
        key = self.strategy, self.launcher, self.steps, self.dropout, self.form
        self.reference = projects.references.setdefault(key, self.folder / "reference")
        if not self.reference.exists():
            self.finish(self.reference)
        needs_disk = any(fault.kind.startswith("disk") for fault in self.faults)
        with small_disk(self.run.parent) if needs_disk else nullcontext():
            outcomes = [self.inject(number, fault) for number, fault in enumerate(self.faults)]
            # Which masks dropout draws depends on the layout.
            checks = {"bitwise": self.check_same} | ({} if self.dropout else {"other": self.check_other})
            for name in ("other", "ranks"):
                shutil.copytree(self.run, self.folder / name)
            for name, check in checks.items():
                found = ""
                try:
                    check()
                except AssertionError:
                    found = f"{self.folder}: {traceback.format_exc()}"
                for outcome in outcomes:
                    outcome.checks[name] = found
        return outcomes

    def set_up(self, projects: Projects, steps: int) -> None:
        """Render the project, and choose a folder for the run."""
        self.projects, self.project = projects, projects.render(self.strategy, self.launcher)
        self.folder, self.nproc = projects.folder / f"chain-{next(projects.numbers)}", world_size(self.strategy)
        self.steps, self.run = steps, self.folder / "disk" / "run"
        self.run.parent.mkdir(parents=True)

    @contextmanager
    def launched(self, folder: Path, run: Path, project: Path, nproc: int, **environment: str) -> Iterator[Any]:
        """Start a run, with temporary files, shared memory and log in ``folder``; each start has the same command."""
        for name in ("tmp", "shm"):
            (folder / name).mkdir(parents=True)
        environment |= {"NPROC": str(nproc), "MARK": str(folder), "TMPDIR": f"{folder}/tmp", "STOP_SECONDS": "20"}
        environment |= {"DROPOUT": str(self.dropout), "MAX_RESTARTS": str(self.restarts), "OMP_NUM_THREADS": "1"}
        command = [
            *(*(OWN_SHM if os.geteuid() == 0 else []), project / "scripts/launch.sh", "train", "--run.dir", run),
            *("--distributed.device", "cpu", "--data.global_batch_size", "48", "--model.width", "8"),
            *("--train.max_steps", str(self.steps), "--train.log_every", "1", "--train.eval_every", "3"),
            *("--checkpoint.every_steps", "2", "--checkpoint.format", self.form),
            *("--optim.lr", "1e-4"),  # A larger one lets rounding grow with each step.
            *("--data.num_workers", str(self.workers), "--distributed.timeout_seconds", str(self.timeout)),
        ]
        with started(*command, cwd=project, log=folder / "log", **environment) as process:
            yield process

    def finish(self, run: Path, project: Path | None = None, nproc: int | None = None) -> None:
        """Let a run end by itself; fails if it does not."""
        project, folder = project or self.project, run.with_name(f"{run.name}-end")
        with self.launched(folder, run, project, nproc or self.nproc) as process:
            assert process.wait(600) == 0, read(folder / "log")
        for path in (run / "checkpoints").glob(f"*{self.steps:08d}.dcp"):
            alone(project, "convert", "--checkpoint", path, "--output", path.with_suffix(".pt"))

    def inject(self, number: int, fault: Fault) -> Outcome:
        """Start the run with a fault, wait until it has ended, and look at what it printed and left."""
        folder = self.folder / f"{number:02d}-{fault.phase}-{fault.kind}".replace(" ", "-")
        newest = max((int(path.stem[5:]) for path in list_checkpoints(self.run)), default=0)
        fault = replace(fault, step=newest + fault.step, folder=str(folder), run=str(self.run))
        environment = {"FAULT": json.dumps(asdict(fault))}
        deadline = time.monotonic() + 600  # Of a run that ends before its fault.
        with self.launched(folder, self.run, self.project, self.nproc, **environment) as process:
            while process.poll() is None or find_marked_processes(str(folder)):
                if time.monotonic() > min(deadline, float(read(folder / "fired") or "inf") + LIMIT):
                    break
                time.sleep(0.05)
            ended, left = time.monotonic(), find_left(folder)
        fired, log = read(folder / "fired"), f"{folder}: exit code {process.returncode}\n{read(folder / 'log')}"
        (self.run.parent / "ballast").unlink(missing_ok=True)  # The disk has room again.
        outcome = Outcome(fault, self.strategy, ended - float(fired or ended), {"fired": "" if fired else log})
        if not fired:
            return outcome
        goes_on = fault.kind in SURVIVED or self.restarts > 0
        has_ended = not any(each.startswith("process") for each in left) and (process.returncode == 0) == goes_on
        # During the start, the other ranks may not yet wait for this one.
        reports = self.nproc > 1 and fault.phase != "start"
        messages = () if goes_on else MESSAGES[fault.kind][: None if reports else 1]
        values = {"rank": fault.rank, "run": re.escape(str(self.run))}
        named = [re.search(message.format(**values), log, re.MULTILINE) for message in messages]
        outcome.checks["ended"] = "" if has_ended else log
        outcome.checks |= {"named": "" if all(named) else log} if messages else {}
        outcome.checks["clean"] = f"{folder} leaves {left}" if left else ""
        return outcome

    def end_alone(self) -> str:
        """Let the run end by itself, and return what is wrong with its end; nothing of it stays if nothing is."""
        with self.launched(self.folder, self.run, self.project, self.nproc) as process:
            code, deadline = process.wait(600), time.monotonic() + 10
            while find_marked_processes(str(self.folder)) and time.monotonic() < deadline:
                time.sleep(0.05)  # Python's resource tracker needs a moment to end.
            left = find_left(self.folder)
        if code or left:
            return f"{self.folder}: exit code {code}, leaves {left}\n{read(self.folder / 'log')}"
        shutil.rmtree(self.folder)
        return ""

    def check_same(self) -> None:
        """Finish the run, and check that it ends bitwise as the undisturbed one, without temporary files."""
        self.finish(self.run)
        assert comparable(self.run) == comparable(self.reference), "the metrics differ"
        assert_same_weights(self.run, self.reference)
        assert not (left := [*self.run.rglob("*.tmp")]), f"left: {left}"

    def check_other(self) -> None:
        """Finish copies of the run on another number of ranks and under another strategy; check both to rounding."""
        other = self.projects.render("fsdp" if self.strategy == "ddp" else "ddp", self.launcher)
        nproc = 3 if self.strategy in ("ddp", "fsdp", "model_parallel") else 1  # data_parallel has no other.
        for name, project, ranks in (("ranks", self.project, nproc), ("other", other, 2)):
            self.finish(self.folder / name, project, ranks)
            assert_close(self.folder / name, self.reference)


def read(path: Path) -> str:
    """Return the content of a file, or nothing if there is none."""
    return path.read_text() if path.exists() else ""


def find_left(folder: Path) -> list[str]:
    """Return the processes of a run, its temporary files and its shared memory."""
    files = [*(folder / "tmp").iterdir(), *(folder / "shm").iterdir()]
    return [
        *(f"process {pid}" for pid in find_marked_processes(str(folder))),
        *(str(path) for path in files if not path.name.startswith(PYTORCH_CACHE)),
    ]


def list_checkpoints(run: Path) -> list[Path]:
    """Return the complete checkpoints of a run."""
    return [path for path in run.glob("checkpoints/step-*") if path.suffix in (".pt", ".dcp")]


def comparable(run: Path) -> list[dict[str, Any]]:
    """Return all records of a run without what is measured."""
    records = map(json.loads, read(run / "metrics.jsonl").splitlines())
    return [{key: value for key, value in record.items() if key not in MEASURED} for record in records]


def plan(kills: int, seed: int, length: int = 12) -> Iterator[Chain]:
    """Yield chains with so many kills in all; each strategy gets every kind in every phase before one comes again."""
    draw, cases, left, turns = random.Random(seed), {}, kills, Counter[str]()
    for strategy in CYCLE:
        pairs = list(itertools.product(KILLS, PHASES))
        cases[strategy] = itertools.cycle(draw.sample(pairs, len(pairs)))
    for number, strategy in enumerate(itertools.cycle(CYCLE)):
        if left <= 0:
            return
        faults = []
        for kind, phase in itertools.islice(cases[strategy], min(length, left)):
            rank = 0 if phase in MAIN_PHASES else draw.randrange(world_size(strategy))
            faults.append(Fault(kind, phase, rank, draw.randint(1, 3)))
        left, turn = left - length, turns[strategy]
        turns[strategy] += 1
        launcher = CHOICES["launcher"][(number + number // len(CYCLE)) % 2]
        form = "sharded" if (number + turn) % 3 == 1 else "full"
        # The first chain of a strategy is compared with other layouts, the second one has dropout.
        yield Chain(strategy, launcher, faults, 0.1 * (turn % 2), int(number % 5 == 4), form)


def other_faults(launcher: str) -> Chain:
    """Return a chain with what does not kill at once; it needs root, for its disk."""
    faults = [
        *(Fault("disk full", "in the write", 0, 2), Fault("disk read-only", "before the rename", 0, 3)),
        *(Fault("disk gone", "forward", 1, 3), Fault("segmentation fault", "all-reduce", 1, 2)),
        *(Fault("out of memory", "forward", 1, 2), Fault("stop", "all-reduce", 1, 2)),
        *(Fault("interpreter kept", "evaluation", 1, 2), Fault("clock jumps", "forward", 1, 2)),
    ]
    return Chain("ddp", launcher, faults, dropout=0.1, timeout=10)


def count_exits(projects: Projects, launches: int) -> tuple[str, list[str]]:
    """Launch runs of two steps; return how many of each strategy and launcher ended well, and what is wrong."""
    pairs = list(itertools.product(CHOICES["parallelism"], CHOICES["launcher"]))
    chains = [
        Chain(*pairs[number % len(pairs)], [], workers=turn % 2, form=("full", "sharded")[turn // 2 % 2])
        for number, turn in ((number, number // len(pairs)) for number in range(launches))
    ]
    for chain in chains:
        chain.set_up(projects, steps=2)
    with ThreadPoolExecutor((os.cpu_count() or 1) + 1) as executor:
        wrong = list(executor.map(Chain.end_alone, chains))
    rows = [f"{'':16}{'':10}{'launches':>9}{'clean':>9}"]
    for strategy, launcher in [*pairs, ("all", "")]:
        found = [
            text for chain, text in zip(chains, wrong, strict=True)
            if strategy == "all" or (chain.strategy, chain.launcher) == (strategy, launcher)
        ]  # fmt: skip
        rows.append(f"{strategy:16}{launcher:10}{len(found):9}{found.count(''):9}")
    return "\n".join(rows), [text for text in wrong if text]


def table(outcomes: list[Outcome]) -> str:
    """Return how many faults of each kind, strategy and phase passed each check, and how many had it."""
    columns = ("fired", "ended", "named", "clean", "bitwise", "other")
    rows = [f"{'':20}" + "".join(f"{column:>9}" for column in ("faults", *columns, "median s", "max s"))]
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        for name in ("all", outcome.fault.kind, outcome.strategy, outcome.fault.phase):
            groups.setdefault(name, []).append(outcome)
    for name in sorted(groups, key=["all", *MESSAGES, *SURVIVED, *CHOICES["parallelism"], *PHASES].index):
        group = groups[name]
        seconds = [outcome.seconds for outcome in group]
        cells = [str(len(group))]
        for column in columns:
            found = [outcome.checks[column] for outcome in group if column in outcome.checks]
            cells.append(f"{found.count('')}/{len(found)}" if found else "")
        cells += [f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}"]
        rows.append(f"{name:20}" + "".join(f"{cell:>9}" for cell in cells))
    return "\n".join(rows)


def inject_faults(projects: Projects, chains: Iterable[Chain]) -> list[str]:
    """Play chains of faults, print the table of what came of them, and return what is wrong."""
    outcomes = list[Outcome]()
    with suppress(KeyboardInterrupt):
        for chain in chains:
            outcomes += (new := chain.play(projects))
            wrong = {text for outcome in new for text in outcome.wrong.values()}
            print(f"{chain.strategy}, {chain.launcher}: {len(new)} faults, {len(wrong)} wrong", *wrong, sep="\n")
    print(table(outcomes))
    return [text for outcome in outcomes for text in outcome.wrong.values()]


def main() -> None:
    """Print the table, and exit with 1 if anything is wrong; then the folder of all runs stays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--others", action="store_true", help="also what does not kill; needs root, for a disk")
    parser.add_argument("--exits", type=int, metavar="LAUNCHES", help="inject nothing; count runs that end well")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    with isolate(folder):
        projects = Projects(folder)
        if options.exits:
            counts, wrong = count_exits(projects, options.exits)
            print(*wrong, counts, sep="\n")
        else:
            others = [other_faults(launcher) for launcher in CHOICES["launcher"] if options.others]
            wrong = inject_faults(projects, [*plan(options.kills, options.seed), *others])
    if wrong:
        sys.exit(f"error: something is wrong; see {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
