"""Tracking services: what their libraries wrote is read back, after kills and resumes; one that fails harms no run."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Bake, leave_to_weekly
from runs import (
    ENDLESS,
    SHORT,
    alone,
    edit,
    find_marked_processes,
    last_step,
    launch,
    newest_checkpoint,
    records,
    started,
    wait_for_step,
    wait_until,
)
from trackers import READERS, points

pytestmark = pytest.mark.slow
SERVICES = sorted(READERS)
# The rates do not depend on when the run ends.
SAVING = "--train.eval_every 50 --checkpoint.every_steps 50 --train.epochs 100000 --optim.decay_steps 1000".split()


@pytest.fixture(autouse=True)
def without_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No key and no server of whoever runs the tests, and no traffic."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def run_id(folder: Path) -> str:
    """Return the id of the run that the newest checkpoint is of."""
    return str(torch.load(newest_checkpoint(folder), weights_only=True)["progress"]["run_id"])


def has_begun(service: str, folder: Path) -> bool:
    """Return whether a service's library has written something of a run."""
    if service == "wandb":
        return any(file.stat().st_size > 100 for file in folder.glob("wandb/*run-*/run-*.wandb"))
    if not (folder.parent / "mlflow.db").exists():
        return False
    with closing(sqlite3.connect(folder.parent / "mlflow.db")) as database:
        try:
            return bool(database.execute("select count(*) from metrics").fetchone()[0])
        except sqlite3.OperationalError:  # The tables are being made.
            return False


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_has_each_record_once_after_a_kill_and_a_resume(bake: Bake, tmp_path: Path, service: str) -> None:
    project, folder, log = bake(tracker=service), tmp_path / "runs" / "a", tmp_path / "log"
    folder.parent.mkdir()
    words, mark = ("train", *SHORT, *SAVING, "--run.dir", folder), str(tmp_path)
    with started("scripts/launch.sh", *words, *ENDLESS, cwd=project, log=log, NPROC="2", MARK=mark) as launcher:
        wait_for_step(60, folder, launcher, log)
        wait_until(lambda: has_begun(service, folder), "the service has records", 240)
        launcher.kill()
        wait_until(lambda: not find_marked_processes(mark), "the ranks, the follower and what it started end", 30)
    killed, first_id = last_step(folder), run_id(folder)
    last = killed + 20
    # Whatever is late is sent by the same command, which finds the run done.
    outputs = [launch(project, *words, "--train.max_steps", str(last)) for _ in range(2)]
    if service == "wandb":
        (upload,) = re.findall(r"to upload it: (\S+) sync (\S+)$", outputs[1].stderr, re.MULTILINE)
        assert [(project / path).exists() for path in upload] == [True, True]
    assert f"step {last} of {last}" in outputs[1].stdout and "warning" not in outputs[1].stderr
    assert run_id(folder) == first_id
    # What ``evaluate`` may add: another split, and an earlier step at the end.
    with open(folder / "metrics.jsonl", "a") as metrics:
        for split, step in (("validation", last), ("other", 50)):
            record = {"event": "eval", "step": step, "split": split, "loss": 1.5}
            metrics.write(json.dumps(record) + "\n")
    assert "warning" not in launch(project, *words, "--train.max_steps", str(last)).stderr

    tracked = READERS[service](folder)[first_id]
    assert service == "wandb" or tracked["status"] == "FINISHED"
    for event, split in (("train", "train"), ("eval", "test")):
        of_split = [record for record in records(folder, event) if record.get("split", "train") == split]
        wanted = [(record["step"], pytest.approx(record["loss"])) for record in of_split]
        assert len(wanted) == (last if event == "train" else len({*range(50, last, 50), last}))
        assert points(tracked, f"{split}/loss") == wanted
        print(f"{service}, killed after step {killed}: {len(wanted)} records of {event} written, and read back once")
    assert [loss for _, loss in points(tracked, "validation/loss") + points(tracked, "other/loss")] == [1.5, 1.5]
    names = {name for _, row in tracked["rows"] for name in row}
    assert service == "mlflow" or "curves/path" in names
    assert names >= {"train/samples_per_second", "train/memory_mib", "test/accuracy"}
    settings = tracked["settings"]
    assert settings["optim.decay_steps"] == "1000" if service == "mlflow" else settings["provenance"]["world_size"] == 2
    assert {Path(file).name for file in tracked["files"]} >= {"provenance.json", "curves.png"}

    # A fresh run is another one, and so is a branch of this one.
    start = ("--checkpoint.resume", newest_checkpoint(folder), "--train.max_steps", str(last + 4))
    for name, words in (("b", ()), ("c", start)):
        alone(project, "train", *SHORT, *SAVING, *words, "--run.dir", folder.with_name(name))
        assert run_id(folder.with_name(name)) != run_id(folder)
    everything = {name: READERS[service](folder.with_name(name)) for name in "abc"}
    branch = everything["c"][run_id(folder.with_name("c"))]
    assert [step for step, _ in points(branch, "train/loss")] == [last + 1, last + 2, last + 3, last + 4]
    assert len(set().union(*everything.values())) == 3


def test_the_identity_of_a_run_is_in_its_checkpoints(plain: Path, tmp_path: Path) -> None:
    words = ("train", *SHORT, "--checkpoint.every_steps", "3")

    def identity(name: str, *more: Any) -> str:
        alone(plain, *words, *more, "--run.dir", tmp_path / name)
        assert json.loads((tmp_path / name / "provenance.json").read_text())["run_id"] == run_id(tmp_path / name)
        return run_id(tmp_path / name)

    first = identity("a")
    assert len(first) == 16 and identity("a", "--train.max_steps", "9") == first
    branch = ("--checkpoint.resume", tmp_path / "a" / "checkpoints" / "step-00000009.pt", "--train.max_steps", "12")
    assert len({first, identity("b"), identity("c", *branch)}) == 3
    # Checkpoints on another disk are still those of this run.
    moved = (tmp_path / "a" / "checkpoints").rename(tmp_path / "disk")
    (tmp_path / "a" / "checkpoints").symlink_to(moved)
    assert identity("a", "--train.max_steps", "12") == first


# A library that cannot be imported, one that raises, and one that hangs.
BROKEN = {
    "missing": "raise ModuleNotFoundError('no such module: it is planted')",
    # A message that is cut within the password.
    "raising": "def __getattr__(name): raise SystemExit(255 * 'x' + ' https://user:secret/with@signs@host')",
    "hanging": "import time\ntime.sleep(1000)",
}


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("service", leave_to_weekly(SERVICES, ["mlflow"]))
def test_a_library_that_fails_or_hangs_costs_one_warning(bake: Bake, tmp_path: Path, service: str, fault: str) -> None:
    project = bake(tracker=service)
    edit(project, "reporting/follow.py", '"finished": 60.0', '"finished": 3.0')
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / f"{service}.py").write_text(BROKEN[fault])
    path = os.pathsep.join((str(tmp_path / "path"), "src"))
    script = project / "scripts" / "launch.sh"
    arguments = ("train", *SHORT, "--run.dir", tmp_path / "run")
    with started(script, *arguments, cwd=project, NPROC="1", PYTHONPATH=path) as process:
        _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert last_step(tmp_path / "run") == 6 and (tmp_path / "run" / "curves.png").exists()
    warnings = [line for line in stderr.splitlines() if "warning: " in line]
    assert len(warnings) == 1 and service in warnings[0] and "the same train command" in warnings[0], stderr
    assert ("was not done 3 s" in warnings[0]) == (fault == "hanging")
    log = (tmp_path / "run" / "tracker.log").read_text()
    assert "secret" not in stderr + log and (fault == "hanging" or "Traceback" in log)


# A W&B that is online: it keeps what it gets in a file, and goes offline before the first picture arrives.
ONLINE = """
import json, os
from pathlib import Path
STATE = Path(os.environ["STATE"])

class Error(Exception): pass

def init(**options): return Run()

def Settings(**options): pass

def Image(path): return path

class Run:
    def __init__(self):
        self.rows = json.loads(STATE.read_text()) if STATE.exists() else []
        self.step, self.resumed = max([row for row, _ in self.rows], default=-1) + 1, STATE.exists()
        self.config = type("Config", (), {"update": lambda *_, **options: None})
        self.summary = {name: value for _, row in self.rows for name, value in row.items()}

    def log(self, values, step):
        if "curves" in values and "BROKEN" in os.environ:
            raise Error("the line is down")
        self.rows.append((step, values))
        STATE.write_text(json.dumps(self.rows))

    def save(self, *_, **options): pass

    def finish(self, exit_code): pass
"""


def test_a_resumed_run_online_gets_what_it_lacks_and_nothing_twice(bake: Bake, tmp_path: Path) -> None:
    """The program that sends, alone."""
    folder, state = tmp_path / "run", tmp_path / "state"
    folder.mkdir()
    (tmp_path / "wandb.py").write_text(ONLINE)
    (folder / "config.yaml").write_text("run: {seed: 0}\n")
    (folder / "provenance.json").write_text('{"run_id": "a"}\n')
    (folder / "curves.png").touch()
    program = bake(tracker="wandb") / "src/my_experiment/reporting/follow.py"
    environment = {"WANDB_MODE": "online", "STATE": str(state), "PYTHONPATH": str(tmp_path)}

    def send(steps: int, **more: str) -> list[tuple[int, float | str]]:
        """Send the first ``steps`` records; return the rows that W&B then has, with their losses or pictures."""
        lines = [json.dumps({"event": "train", "step": step, "loss": step}) for step in range(steps)]
        (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
        words = (sys.executable, "-P", program, folder)
        variables = os.environ | environment | more
        subprocess.run(words, input="finished", env=variables, capture_output=True, text=True, timeout=60)
        return [(row, values.get("train/loss", "curves")) for row, values in json.loads(state.read_text())]

    assert send(2, BROKEN="yes") == [(0, 0), (1, 1)]
    assert send(2) == [(0, 0), (1, 1), (2, "curves")]
    assert send(2) == [(0, 0), (1, 1), (2, "curves")]
    assert send(4)[3:] == [(3, 2), (4, 3), (4, "curves")]


# Notes the outcome, and takes a while.
NOTING = """
class Service:
    def __init__(self, run_dir, settings, provenance):
        self.file = run_dir / "outcome"

    def log(self, rows):
        pass

    def finish(self, outcome, files):
        self.file.write_text(outcome)
        import time
        time.sleep(3)


if __name__"""


def test_the_outcome_is_how_the_loop_ended(bake: Bake, tmp_path: Path) -> None:
    """Of streams, whose number of steps is unknown, or less than what was asked for."""
    project, log = bake(tracker="mlflow"), tmp_path / "log"
    edit(project, "reporting/follow.py", "\nif __name__", NOTING)
    known = "return planned_steps, min(planned_steps, train.max_steps or planned_steps)"
    edit(project, "optim.py", known, "return planned_steps, train.max_steps")
    words = (sys.executable, "-m", "my_experiment", "train", *SHORT, "--run.dir")
    complete, stopped = tmp_path / "complete", tmp_path / "stopped"
    more = ("--train.epochs", "1", "--train.max_steps", "1000000")
    with started(*words, complete, *more, cwd=project, log=log, PYTHONPATH="src") as process:
        wait_until(lambda: (complete / "outcome").exists(), "the run has ended", 120)
        process.terminate()  # Too late: there is nothing left to stop.
        assert process.wait(60) == 0, log.read_text()
    assert (complete / "outcome").read_text() == "finished"
    more = ("--train.epochs", "100000", "--train.max_steps", "null", "--optim.decay_steps", "1000")
    with started(*words, stopped, *more, cwd=project, log=log, PYTHONPATH="src") as process:
        wait_for_step(5, stopped, process, log)
        process.terminate()
        assert process.wait(60) == 0 and "stopped by SIGTERM" in log.read_text(), log.read_text()
    assert (stopped / "outcome").read_text() == "stopped"


@pytest.mark.parametrize("service", leave_to_weekly(SERVICES, ["mlflow"]))
def test_a_hanging_library_neither_delays_a_stop_nor_outlives_a_kill(bake: Bake, tmp_path: Path, service: str) -> None:
    project, run, log = bake(tracker=service), tmp_path / "run", tmp_path / "log"
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / f"{service}.py").write_text(BROKEN["hanging"])
    path, mark = os.pathsep.join((str(tmp_path / "path"), "src")), str(tmp_path)
    words = ("scripts/launch.sh", "train", *SHORT, *ENDLESS, "--run.dir", run)
    with started(*words, cwd=project, log=log, NPROC="1", PYTHONPATH=path, MARK=mark) as launcher:
        wait_for_step(5, run, launcher, log)
        launcher.terminate()
        assert launcher.wait(60) == 128 + signal.SIGTERM and "stopped by SIGTERM" in log.read_text(), log.read_text()
        wait_until(lambda: not find_marked_processes(mark), "the follower ends", 30)
    with started(*words, cwd=project, log=log, NPROC="1", PYTHONPATH=path, MARK=mark) as launcher:
        wait_for_step(last_step(run) + 5, run, launcher, log)
        launcher.kill()
        wait_until(lambda: not find_marked_processes(mark), "the follower ends", 30)
