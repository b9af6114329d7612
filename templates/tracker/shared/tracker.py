"""Metrics and progress of a run. A record is one line of ``metrics.jsonl``, written by one call of ``Tracker.log``:

{"event": "train", "step": 10, "epoch": 0, "loss": 2.1, "lr": 0.001, "grad_norm": 1.4, "slowest_rank": 1, ...}
{"event": "eval", "step": 110, "split": "test", "num_samples": 360, "loss": 0.31, ...}
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from ..runtime import disk_errors
#:: block imports ::#
#:: endblock ::#
from .metrics import draw_curves, format_record, truncate_metrics


class Tracker:
    """Records a run in ``run_dir`` on rank 0; on the other ranks, its methods do nothing.

    On a terminal it shows a progress bar; elsewhere it prints a line for each record. At the end it draws the loss and
    ``best_metric``.
    """

    def __init__(self, run_dir: Path, is_main: bool, best_metric: str) -> None:
        self.run_dir, self.is_main, self.best_metric = run_dir, is_main, best_metric
        self.metrics: TextIO | None = None
        self.bar: tqdm[Any] | None = None
        #:: block attributes ::#
        #:: endblock ::#

    @contextmanager
    def record(self, done: int, total: int | None, evaluated: int) -> Iterator[None]:
        """Record a run of ``total`` steps (None: unknown) for the duration of a ``with`` block.

        Records after step ``done`` and evaluations after step ``evaluated`` are left from an interrupted run, and are
        dropped.
        """
        if not self.is_main:
            yield
            return
        path = self.run_dir / "metrics.jsonl"
        truncate_metrics(path, done, evaluated)
        bar = tqdm(total=total, initial=done, unit="step", disable=not sys.stderr.isatty(), dynamic_ncols=True)
        with ExitStack() as stack:
            self.metrics = stack.enter_context(open(path, "a", encoding="utf-8", buffering=1))
            self.bar = stack.enter_context(bar)
            #:: block open ::#
            #:: endblock ::#
            yield
            draw_curves(path, self.run_dir / "curves.png", self.best_metric)
            #:: block close ::#
            #:: endblock ::#

    def advance(self) -> None:
        """Count one step."""
        if self.bar is not None:
            self.bar.update()

    def log(self, record: dict[str, Any]) -> None:
        """Write a record (``event``, ``step`` and metrics) to all outputs."""
        if self.metrics is None or self.bar is None:
            return
        with disk_errors(self.run_dir / "metrics.jsonl"):
            self.metrics.write(format_record(record) + "\n")
        #:: block log ::#
        #:: endblock ::#
        metrics = "  ".join(
            f"{name} {value:.4g}" for name, value in record.items() if isinstance(value, int | float) and name != "step"
        )
        if record["event"] == "train" and not self.bar.disable:
            self.bar.set_postfix_str(f"loss {record['loss']:.4g}")
        else:
            self.print(f"{record['event']} step {record['step']}  {metrics}")

    def print(self, text: str) -> None:
        """Print one line, above the progress bar if there is one."""
        if self.is_main:
            tqdm.write(text)
            sys.stdout.flush()
