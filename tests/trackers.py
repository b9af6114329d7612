"""Reads what the libraries of tracking services have written: with their own readers, where they have one."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7  # Of LevelDB's log format, which W&B's files have: blocks, and what is before each piece.
FULL, LAST = 1, 4  # A piece that is a whole message, and the last piece of one.


def messages(file: Path) -> Iterator[bytes]:
    """Yield the messages of a ``.wandb`` file; its first seven bytes say what it is."""
    content = file.read_bytes()
    assert content.startswith(b":W&B")
    position, message = HEADER, b""
    while position + HEADER <= len(content):
        left = BLOCK - position % BLOCK
        if left < HEADER:  # The rest of a block is padding.
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + HEADER])
        piece = content[position + HEADER : position + HEADER + length]
        position += HEADER + length
        message += piece
        if kind in (FULL, LAST):
            yield message
            message = b""


def read_wandb(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Return each W&B run of a run directory by its id: its rows, (step, metrics), and its settings."""
    from wandb.proto.wandb_internal_pb2 import Record

    runs: dict[str, dict[str, Any]] = {}
    for file in sorted(run_dir.glob("wandb/*run-*/run-*.wandb")):
        run: dict[str, Any] = {}
        for message in messages(file):
            record = Record.FromString(message)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                run = runs.setdefault(record.run.run_id, {"rows": [], "settings": {}, "files": set()})
                run["settings"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif kind == "history":
                row = {
                    "/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item
                }
                run["rows"].append((record.history.step.num, row))
            elif kind == "files":
                run["files"] |= {item.path for item in record.files.files}
    return runs


def read_mlflow(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Return each MLflow run in the store next to a run directory, as ``read_wandb`` does."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run_dir.parent}/mlflow.db")
    (experiment,) = [each for each in client.search_experiments() if each.name != "Default"]
    runs = {}
    for run in client.search_runs([experiment.experiment_id]):
        points = [p for key in run.data.metrics for p in client.get_metric_history(run.info.run_id, key)]
        rows = [(point.step, {point.key: point.value}) for point in points]
        files = {file.path for file in client.list_artifacts(run.info.run_id)}
        values = {"rows": rows, "settings": run.data.params, "files": files, "status": run.info.status}
        assert run.data.tags["run_id"] not in runs
        runs[run.data.tags["run_id"]] = values
    return runs


READERS = {"wandb": read_wandb, "mlflow": read_mlflow}


def points(run: dict[str, Any], name: str) -> list[tuple[int, float]]:
    """Return the steps and values of a metric, in the order in which they were sent."""
    return [(step, row[name]) for step, row in run["rows"] if name in row]
