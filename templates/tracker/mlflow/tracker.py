"""MLflow: the records of a run, at ``MLFLOW_TRACKING_URI``.

The default of ``MLFLOW_TRACKING_URI`` is the database ``mlflow.db`` next to ``run.dir``.
"""

import fcntl
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow

from .config import UserError
from .distributed import derive_seed
from .files import write_atomically


class Tracker:
    """Sends the records of rank 0 to MLflow; a resumed run continues its MLflow run."""

    def __init__(self, run_dir: Path, settings: dict[str, Any], step: int) -> None:
        """Continue the MLflow run after ``step``; a run that starts at step 0 gets a new one."""
        self.has_failed = False
        # MLflow chooses the ids of its runs. So the first start writes a random id of its own, by
        # which the MLflow run is tagged, and the next start finds the run by this tag.
        id_file = run_dir / "mlflow_id"
        if step == 0 or not id_file.exists():
            write_atomically(id_file, os.urandom(8).hex())
        connect(run_dir.resolve().parent)
        # A copy of run.dir has another path, and gets an MLflow run of its own, with all records.
        tag = f"{derive_seed(id_file.read_text(), str(run_dir.resolve())):x}"
        run = start_run(run_dir.name, tag)
        parameters = {}
        for section, values in settings.items():
            for name, value in values.items():
                # MLflow refuses to change a parameter, so it keeps the first value of a setting.
                if f"{section}.{name}" not in run.data.params:
                    parameters[f"{section}.{name}"] = value
        mlflow.log_params(parameters)
        # After a kill or a failure, MLflow may lack the last records of metrics.jsonl. So all of
        # them are logged again, and `log` skips those that MLflow has.
        self.sent_metrics = run.data.metrics
        for line in (run_dir / "metrics.jsonl").read_text().splitlines():
            self.log(json.loads(line))

    def log(self, record: dict[str, Any]) -> None:
        """Send the numbers of a record, named such as ``train/loss``, unless MLflow has them."""
        split = record.get("split", "train")
        # A resumed run repeats steps that the killed one has sent. MLflow would keep both numbers.
        if record["step"] <= self.sent_metrics.get(f"{split}/step", -1):
            return
        numbers = {}
        for name, value in record.items():
            if isinstance(value, int | float):
                accepted_name = re.sub(r"[^\w\-./ ]", "_", name)  # MLflow refuses "top@5".
                numbers[f"{split}/{accepted_name}"] = value
        self.try_to_send(mlflow.log_metrics, numbers, record["step"])

    def close(self) -> None:
        """Mark the MLflow run as finished."""
        self.try_to_send(mlflow.end_run)

    def try_to_send(self, send: Callable[..., object], *arguments: Any) -> None:
        """Call ``send``; after its first error, print a warning and call it no more."""
        # The run continues without its tracker, and does not wait for a server that is down.
        if self.has_failed:
            return
        try:
            send(*arguments)
        except Exception as error:
            self.has_failed = True
            advice = "the next start sends what it lacks"
            print(f"warning: MLflow has failed ({error!r}); {advice}", file=sys.stderr)


def connect(folder: Path) -> None:
    """Choose the server and the experiment; raises UserError if the server cannot be reached."""
    server = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder}/mlflow.db"
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "{{ cookiecutter.project_slug }}")
    # Whoever uses a new database first creates its tables. If several runs start together, all try
    # to, and all but one fail. So one after the other holds this lock, until it closes the file.
    with open(folder / ".mlflow.lock", "w") as lock_file:
        fcntl.lockf(lock_file, fcntl.LOCK_EX)
        mlflow.set_tracking_uri(server)
        try:
            mlflow.set_experiment(name)
        except mlflow.MlflowException as error:
            advice = "MLFLOW_TRACKING_URI is optional"
            raise UserError(f"MLflow cannot start: {error}; {advice}") from None


def start_run(name: str, tag: str) -> Any:
    """Continue the MLflow run that has the tag ``tag``, or start a new one if there is none."""
    tagged_runs: Any = mlflow.search_runs(filter_string=f"tags.id = '{tag}'", output_format="list")
    run_id = None
    if tagged_runs:
        run_id = tagged_runs[0].info.run_id
    return mlflow.start_run(run_id, run_name=name, tags={"id": tag})
