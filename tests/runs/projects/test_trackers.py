"""Each tracking service, read back, has every record of a killed and resumed run once, and its settings."""

from __future__ import annotations

import os
import shutil
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Bake, edit, launch, launch_and_kill, read_records

pytestmark = pytest.mark.long

STEPS, SAVED = 300, 100  # W&B writes 50 records at a time.
TRAIN = (
    f"train --distributed.device cpu --train.max_steps {STEPS} --train.log_every 1 --train.eval_every {SAVED}".split()
)
TRAIN += "--data.global_batch_size 32 --model.width 8 --model.depth 1 --optim.lr 0.00321".split()

Points = dict[str, list[tuple[int, float]]]
BLOCK, HEADER = 32768, 7  # Of LevelDB's log format, which W&B's files have: blocks, and what is before each piece.
FULL, LAST = 1, 4  # A piece that is a whole message, and the last piece of one.


def read_tensorboard(run_dir: Path) -> tuple[Points, str]:
    """Read event files as TensorBoard does."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), {"scalars": 0})
    events.Reload()
    points = {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    return points, events.Tensors("settings/text_summary")[-1].tensor_proto.string_val[0].decode()


def read_mlflow(run_dir: Path) -> tuple[Points, str]:
    """Read the one run of the one experiment in the store next to a run directory."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run_dir.parent}/mlflow.db")
    (experiment,) = [each for each in client.search_experiments() if each.name != "Default"]
    (run,) = client.search_runs([experiment.experiment_id])
    points = {
        name: [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }
    return points, str(run.data.params)


def read_wandb(run_dir: Path) -> tuple[Points, str]:
    """Read what ``wandb sync`` would send, which is one run, whose pictures have steps as their x axis."""
    from wandb.proto.wandb_internal_pb2 import Record

    points, settings, ids, axes = defaultdict(list), "", set(), set()
    for file in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb")):
        for record in map(Record.FromString, split_messages(file.read_bytes())):
            ids |= {record.run.run_id} - {""}
            axes |= {(record.metric.glob_name, record.metric.step_metric)}
            settings += str(record.run.config) + str(record.config)
            row = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            for name, value in row.items():
                step = row.get(f"{name.split('/')[0]}/step")
                points[name] += [(int(step), float(value))] if step else []
    assert len(ids) <= 1 and axes >= {("train/*", "train/step"), ("validation/*", "validation/step")}
    return points, settings


def split_messages(content: bytes) -> Iterator[bytes]:
    """Yield the messages of a ``.wandb`` file; its first seven bytes are a signature."""
    position, message = HEADER, b""
    while position + HEADER <= len(content):  # A piece may be cut, if its writer was killed.
        left = BLOCK - position % BLOCK
        if left < HEADER:  # The rest of a block is padding.
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + HEADER])
        message += content[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind in (FULL, LAST):
            yield message
            message = b""


READERS = {"tensorboard": read_tensorboard, "mlflow": read_mlflow, "wandb": read_wandb}


@pytest.fixture(autouse=True)
def without_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No key and no server of whoever runs the tests, and no traffic."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.mark.parametrize(
    "service", [pytest.param(each, marks=[pytest.mark.weekly] * (each == "mlflow")) for each in READERS]
)
def test_a_service_has_each_record_once_after_a_kill_and_a_resume(bake: Bake, tmp_path: Path, service: str) -> None:
    project, folder = bake(tracker=service), tmp_path / "runs" / "a"
    words = (*TRAIN, "--run.dir", folder)
    launch_and_kill(project, *words, when=lambda: len(read_records(folder)) > SAVED + 60)
    killed = read_records(folder)[-1]["step"]
    resumed = killed - killed % SAVED
    tracked = max(READERS[service](folder)[0]["train/loss"])[0]
    assert resumed < tracked <= killed < STEPS, "there is a record that the resumed run writes again"
    result = launch(project, *words)
    assert f"step {resumed} of {STEPS}" in result.stdout and "warning" not in result.stderr

    points, settings = READERS[service](folder)
    for event, split, name, every in (("train", "train", "loss", 1), ("eval", "validation", "accuracy", SAVED)):
        records = [record for record in read_records(folder) if record["event"] == event]
        assert [record["step"] for record in records] == [*range(every, STEPS + 1, every)]
        expected = [(record["step"], pytest.approx(record[name], rel=1e-6)) for record in records]
        assert sorted(points[f"{split}/{name}"]) == expected
    assert "0.00321" in settings


def read_runs(service: str, folder: Path) -> list[set[str]]:
    """Return the names of the numbers that each run of a service has."""
    if service == "wandb":
        return [set(read_wandb(run_dir)[0]) for run_dir in sorted(folder.glob("*")) if (run_dir / "wandb").exists()]
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (experiment,) = [each for each in client.search_experiments() if each.name != "Default"]
    return [set(run.data.metrics) for run in client.search_runs([experiment.experiment_id])]


@pytest.mark.parametrize("service", ["wandb", pytest.param("mlflow", marks=pytest.mark.weekly)])
def test_a_copy_of_a_run_is_tracked_as_one_of_its_own(bake: Bake, tmp_path: Path, service: str) -> None:
    project, folder = bake(tracker=service), tmp_path / "runs"
    edit(project, {("task.py", ' "accuracy": correct.mean(),'): ' "accuracy": correct.mean(), "top@5": 1.0,'})
    words = [*TRAIN, "--train.max_steps", "4", "--run.dir", folder / "a"]
    launch(project, *words)
    shutil.copytree(folder / "a", folder / "b")
    words[-3:] = ["8", "--run.dir", folder / "b"]
    result = launch(project, *words)
    assert "step 4 of 8" in result.stdout and "warning" not in result.stderr, result.stderr
    first, second = read_runs(service, folder)
    assert first == second >= {"train/loss", "validation/accuracy"}
    if service == "wandb":
        assert len({run_dir.name.split("-")[-1] for run_dir in folder.glob("*/wandb/offline-run-*")}) == 2
