"""Reads what the tracking services' libraries have written: the points of each metric, and the settings as text."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

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
    """Read what ``wandb sync`` would send, which is one run."""
    from wandb.proto.wandb_internal_pb2 import Record

    points, settings, ids = defaultdict(list), "", set()
    for file in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb")):
        for record in map(Record.FromString, split_messages(file.read_bytes())):
            ids |= {record.run.run_id} - {""}
            settings += str(record.run.config) + str(record.config)
            row = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            for name, value in row.items():
                step = row.get(f"{name.split('/')[0]}/step")
                points[name] += [(int(step), float(value))] if step else []
    assert len(ids) <= 1
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
