"""MLflow: the records of a run, at ``MLFLOW_TRACKING_URI``, by default in ``mlflow.db`` next to ``run.dir``."""

import fcntl
import json
import os
import sys
from pathlib import Path
from typing import Any

import mlflow

from .config import UserError
from .files import write_atomically


class Tracker:
    """Sends what rank 0 logs; a run that resumes from a ``step`` above 0 is the same one for MLflow, by its tag."""

    def __init__(self, run_dir: Path, settings: dict[str, Any], step: int) -> None:
        path, folder = run_dir / "mlflow_id", run_dir.resolve().parent
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "{{ cookiecutter.project_slug }}")
        if step == 0 or not path.exists():
            write_atomically(path, lambda file: file.write(os.urandom(8).hex().encode()))
        with open(folder / ".mlflow.lock", "w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)  # Runs that start together would all create the tables.
            mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder}/mlflow.db")
            try:
                mlflow.set_experiment(name)
            except mlflow.MlflowException as error:
                raise UserError(f"MLflow cannot start: {error}; MLFLOW_TRACKING_URI is optional") from None
        tags = {"id": path.read_text()}
        found: Any = mlflow.search_runs(filter_string=f"tags.id = '{tags['id']}'", output_format="list")
        run = mlflow.start_run(found[0].info.run_id if found else None, run_name=run_dir.name, tags=tags)
        self.known, self.has_failed = run.data.metrics, False
        pairs = [(f"{section}.{key}", value) for section, part in settings.items() for key, value in part.items()]
        mlflow.log_params({key: value for key, value in pairs if key not in run.data.params})
        # What it lacks after a kill or a failure; MLflow keeps what it got first.
        for line in (run_dir / "metrics.jsonl").read_text().splitlines():
            self.log(json.loads(line))

    def log(self, record: dict[str, Any]) -> None:
        """Send the numbers of a record, unless MLflow has them."""
        split = record.get("split", "train")
        if record["step"] > self.known.get(f"{split}/step", -1):
            numbers = {f"{split}/{name}": value for name, value in record.items() if isinstance(value, int | float)}
            self.attempt(lambda: mlflow.log_metrics(numbers, record["step"]))

    def close(self) -> None:
        """Note that the run has ended."""
        self.attempt(mlflow.end_run)

    #:: set service = "MLflow" ::#
    #:: filter indent(4, true) ::#
    #:: include "tracker/shared/attempt.py" ::#
    #:: endfilter ::#
