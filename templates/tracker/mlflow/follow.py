#:: extends "tracker/shared/follow.py" ::#
#:: block title ::#MLflow: to ``MLFLOW_TRACKING_URI``, or else to ``mlflow.db`` next to ``run.dir``#:: endblock ::#
#:: block imports ::#
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
#:: endblock ::#
#:: block service ::#
SERVICE = "mlflow"
RECORDS = 20  # In one message.


class Service:
    """The MLflow run whose tag ``run_id`` is the run's id.

    Args:
        run_dir: Its name is the run's.
        settings: The run's settings: parameters, which MLflow never changes, so those of the first start.
        provenance: What ``provenance.json`` holds; tags.
    """

    def __init__(self, run_dir: Path, settings: dict[str, Any], provenance: dict[str, Any]) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag

        self.metric = Metric
        folder = run_dir.parent  # All runs in it share one store, so that they can be compared.
        with open(folder / ".mlflow.lock", "w") as lock:
            with suppress(OSError):  # Some network filesystems have no locks.
                fcntl.lockf(lock, fcntl.LOCK_EX)  # Runs that start together would all create the tables.
            uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder}/mlflow.db"
            self.client = MlflowClient(uri)
            is_local = not os.environ.get("MLFLOW_TRACKING_URI")
            experiment = self.find_experiment((folder / "mlflow").as_uri() if is_local else None)
        found = self.client.search_runs([experiment], filter_string=f"tags.run_id = '{provenance['run_id']}'")
        tags = {name: str(value) for name, value in provenance.items() if isinstance(value, str | int)}
        run = found[0] if found else self.client.create_run(experiment, tags=tags, run_name=run_dir.name)
        self.run_id, known = run.info.run_id, run.data.params
        self.client.update_run(self.run_id, status="RUNNING")
        flat = {f"{section}.{name}": value for section, part in settings.items() for name, value in part.items()}
        params = [Param(name, str(value)[:500]) for name, value in flat.items() if name not in known]
        self.client.log_batch(self.run_id, params=params, tags=[RunTag(*tag) for tag in tags.items()])
        self.known = run.data.metrics

    def find_experiment(self, artifacts: str | None) -> str:
        """Return the id of the experiment of this project, which is created if it is new."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "{{ cookiecutter.project_slug }}")
        found = self.client.get_experiment_by_name(name)
        return found.experiment_id if found else self.client.create_experiment(name, artifacts)

    def log(self, rows: Sequence[Row]) -> None:
        """Send the records that MLflow does not have; a message has whole records, and at most 1,000 metrics."""
        now, new = int(1000 * time.time()), [row for row in rows if row[1] > self.known.get(f"{row[0]}/step", -1)]
        for start in range(0, len(new), RECORDS):
            part = new[start : start + RECORDS]
            metrics = [self.metric(key, float(x), now, step) for _, step, values in part for key, x in values.items()]
            self.client.log_batch(self.run_id, metrics=metrics)

    def finish(self, outcome: str, files: Sequence[Path]) -> None:
        """Send files, and how the run has ended."""
        for path in files:
            self.client.log_artifact(self.run_id, str(path))
        self.client.set_terminated(self.run_id, {"finished": "FINISHED", "stopped": "KILLED"}.get(outcome, "FAILED"))
#:: endblock ::#
