"""MLflow: the records of a run, at ``MLFLOW_TRACKING_URI``, by default in ``mlflow.db`` next to ``run.dir``.

MLflow keeps what it got first. Each start sends what it lacks of ``metrics.jsonl``, after a kill or a failure.
"""

import fcntl
import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from .checkpoint import write_atomically


class Tracker:
    """Sends what rank 0 logs; a run that resumes from a ``step`` above 0 is the same one for MLflow, by its tag."""

    def __init__(self, run_dir: Path, settings: dict[str, Any], step: int) -> None:
        path, folder = run_dir / "mlflow_id", run_dir.resolve().parent
        if step == 0 or not path.exists():
            write_atomically(path, lambda file: file.write(uuid4().hex.encode()))
        name, tag = os.environ.get("MLFLOW_EXPERIMENT_NAME", "{{ cookiecutter.project_slug }}"), path.read_text()
        with open(folder / ".mlflow.lock", "w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)  # Runs that start together would all create the tables.
            self.client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder}/mlflow.db")
            experiment = self.client.get_experiment_by_name(name)
            number = experiment.experiment_id if experiment else self.client.create_experiment(name)
        found = self.client.search_runs([number], f"tags.id = '{tag}'")
        run = found[0] if found else self.client.create_run(number, tags={"id": tag}, run_name=run_dir.name)
        self.run_id, self.known, self.has_failed = run.info.run_id, run.data.metrics, False
        values = {f"{section}.{name}": value for section, part in settings.items() for name, value in part.items()}
        new = [Param(name, str(value)) for name, value in values.items() if name not in run.data.params]
        self.client.log_batch(self.run_id, params=new)
        self.client.update_run(self.run_id, "RUNNING")
        for line in (run_dir / "metrics.jsonl").read_text().splitlines():
            self.log(json.loads(line))

    def log(self, record: dict[str, Any]) -> None:
        """Send the numbers of a record, unless MLflow has them; a failure does not end the run."""
        split, step, now = record.get("split", "train"), record["step"], int(1000 * time.time())
        if self.has_failed or step <= self.known.get(f"{split}/step", -1):
            return
        numbers = {f"{split}/{name}": value for name, value in record.items() if isinstance(value, int | float)}
        try:
            self.client.log_batch(self.run_id, [Metric(*item, now, step) for item in numbers.items()])
        except Exception as error:
            self.has_failed = True
            print(f"warning: MLflow has failed ({error!r}); the next start sends what it lacks", file=sys.stderr)

    def close(self) -> None:
        """Note that the run has ended."""
        if not self.has_failed:
            self.client.set_terminated(self.run_id)
