"""Side files that are damaged, disks that are full and locks that do not exist never cost a run its checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Bake
from conftest import run as run_program
from runs import SHORT, alone, checkpoints, edit, launch, losses, plant, records, small, small_disk

pytestmark = pytest.mark.slow

LONGER = [*SHORT, "--train.max_steps", "8"]


@pytest.fixture(scope="module")
def project(baked: Bake) -> Path:
    return baked()


@pytest.fixture(scope="module")
def started(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "started"
    alone(project, "train", *SHORT, "--run.dir", folder)
    return folder


@pytest.fixture
def run(started: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(started, tmp_path / "run"))


@pytest.mark.parametrize("damage", [b"", b"[1, 2]", b"\xff\xfe"])
def test_a_damaged_provenance_is_set_aside(project: Path, run: Path, damage: bytes) -> None:
    (run / "provenance.json").write_bytes(damage)
    resumed = alone(project, "train", *LONGER, "--run.dir", run)
    assert "provenance.json.damaged" in resumed.stderr and checkpoints(run)[-1] == "step-00000008.pt"
    assert (run / "provenance.json.damaged").read_bytes() == damage
    assert json.loads((run / "provenance.json").read_text())["earlier"] == []


def test_damaged_metrics_are_set_aside_and_their_records_kept(project: Path, run: Path) -> None:
    expected = losses(run)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    damaged = b"".join(
        [*lines[:2], b"no json\n", b"\xff\xfe\n", b"[1]\n", b'{"step": "3"}\n', b"\n", *lines[2:], b"torn"]
    )
    (run / "metrics.jsonl").write_bytes(damaged)
    resumed = alone(project, "train", *LONGER, "--run.dir", run)
    assert "metrics.jsonl.damaged" in resumed.stderr
    assert (run / "metrics.jsonl.damaged").read_bytes() == damaged
    assert losses(run)[:6] == expected and [record["step"] for record in records(run, "train")] == list(range(1, 9))


def test_a_line_that_a_killed_run_left_is_no_damage(project: Path, run: Path) -> None:
    with open(run / "metrics.jsonl", "a") as metrics:
        metrics.write('{"event": "tra')
    assert "damaged" not in alone(project, "train", *LONGER, "--run.dir", run).stderr
    assert len(losses(run)) == 8


def test_a_file_in_place_of_the_checkpoints_is_rejected(project: Path, run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").write_text("")
    before = sorted(path.name for path in run.iterdir())
    rejected = launch(project, "train", *LONGER, "--run.dir", run, expect=2).stderr
    assert rejected.startswith("error: ") and rejected.count("\n") == 1 and "checkpoints is a file" in rejected
    assert sorted(path.name for path in run.iterdir()) == before


@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_whose_directory_is_deleted_ends_with_an_error(bake: Bake, tmp_path: Path, replaced: bool) -> None:
    project, folder = bake(), tmp_path / "run"
    action = "Path(config.run.dir).rename(config.run.dir + '.moved')" if replaced else "shutil.rmtree(config.run.dir)"
    again = "\n    Path(config.run.dir).mkdir(); (Path(config.run.dir) / '.lock').touch()" if replaced else ""
    plant(
        project,
        "train.py",
        "        progress.step += 1\n",
        f"import shutil\nif progress.step == 3:\n    {action}{again}",
    )
    ended = alone(project, "train", *SHORT, "--run.dir", folder, expect=2)
    assert f"error: {folder} was deleted or replaced" in ended.stderr
    assert not (folder / "checkpoints").exists()


def test_checkpoints_that_cannot_be_removed_only_cost_space(bake: Bake, tmp_path: Path) -> None:
    project = bake()
    fault = 'if path.name == "step-00000002.pt":\n    raise OSError(1, "Operation not permitted")'
    plant(project, "runtime/files.py", "    if path.is_symlink() or not path.is_dir():\n", fault)
    words = [*SHORT, "--checkpoint.every_steps", "1", "--checkpoint.keep", "1", "--train.eval_every", "null"]
    done = alone(project, "train", *words, "--run.dir", tmp_path)
    assert "step-00000002.pt could not be removed: Operation not permitted" in done.stderr
    assert checkpoints(tmp_path) == ["step-00000002.pt", "step-00000006.pt"]


@pytest.mark.parametrize("number", ["ENOSYS", "ENOLCK"])
def test_a_filesystem_without_locks_is_used_with_a_warning(bake: Bake, tmp_path: Path, number: str) -> None:
    project = bake()
    fault = f"raise OSError(errno.{number}, os.strerror(errno.{number}))"
    plant(project, "launch/run_directory.py", "            fcntl.lockf(descriptor", fault)
    done = alone(project, "train", *SHORT, "--run.dir", tmp_path)
    assert f"warning: {tmp_path} is not locked" in done.stderr and checkpoints(tmp_path) == ["step-00000006.pt"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "disk").mkdir()
    with small_disk(tmp_path / "disk") as disk:
        yield disk


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk")
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_a_full_disk_is_named_and_the_run_goes_on_when_there_is_room(project: Path, disk: Path, form: str) -> None:
    run, ballast = disk / "run", disk / "ballast"
    words = ["train", *SHORT, "--checkpoint.format", form, "--checkpoint.every_steps", "3", "--run.dir", run]
    alone(project, *words, "--train.max_steps", "3", "--model.width", "16")
    free = shutil.disk_usage(disk).free
    ballast.write_bytes(b"x" * (free - 100_000))
    full = alone(project, *words, "--model.width", "16", expect=2)
    (error,) = (line for line in full.stderr.splitlines() if line.startswith("error: "))
    assert "No space left on device" in error and str(run / "checkpoints") in error
    assert checkpoints(run) in (["step-00000003.pt"], ["step-00000003.dcp"])
    ballast.unlink()
    assert "step 3 of 6" in alone(project, *words, "--model.width", "16").stdout
    assert len(losses(run)) == 6


def test_a_disk_that_is_full_at_a_log_line_is_named(bake: Bake, tmp_path: Path) -> None:
    project, run = bake(), tmp_path / "run"
    edit(project, "reporting/tracker.py", 'open(path, "a", ', 'open("/dev/full", "a", ')
    full = launch(project, "train", *SHORT, "--run.dir", run, expect=2).stderr
    assert f"error: [Errno 28] No space left on device: '{run}/metrics.jsonl'" in full.splitlines()
    assert "Traceback" not in full and len(full.splitlines()) <= 2, full


# What is renamed to its final name has to be on the disk before; a file keeps its number when its folder is renamed.
SYNC = """
import os, sys
from pathlib import Path
synced, sync, replace = set(), os.fsync, os.replace

def note(descriptor):
    synced.add(os.fstat(descriptor).st_ino)
    sync(descriptor)

def check(source, target):
    files = [Path(source), *Path(source).rglob("*")]
    lost = [path.name for path in files if path.is_file() and path.stat().st_ino not in synced]
    print("replaced", Path(target).name, *lost)
    replace(source, target)

os.fsync, os.replace = note, check
from my_experiment.__main__ import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_a_file_is_on_the_disk_before_it_gets_its_name(baked: Bake, tmp_path: Path, form: str) -> None:
    project, texts, cache = baked(task="language"), tmp_path / "texts", tmp_path / "cache"
    texts.mkdir()
    (texts / "text.txt").write_text("some text, again and again\n" * 3000)
    words = [*SHORT, "--dataset.path", texts, "--dataset.cache", cache, "--checkpoint.format", form]
    command = small(project, "train", *words, "--run.dir", tmp_path / "run")
    done = run_program(sys.executable, "-c", SYNC, *command, cwd=project, PYTHONPATH="src")
    replaced = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("replaced ")]
    text = next(cache.iterdir()).name
    names = {"config.yaml", "provenance.json", "metrics.jsonl", "curves.png", "samples.txt", text}
    assert names | {f"step-00000006.{'pt' if form == 'full' else 'dcp'}"} <= {name for name, *_ in replaced}
    assert [lost for _, *lost in replaced if lost] == []
