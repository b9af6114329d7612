"""Metrics and progress of a run. A record is one line of ``metrics.jsonl``, written by one call of ``Tracker.log``:

{"event": "train", "step": 10, "epoch": 0, "loss": 2.1, "lr": 0.001, "grad_norm": 1.4, "slowest_rank": 1, ...}
{"event": "eval", "step": 110, "split": "test", "num_samples": 360, "loss": 0.31, ...}
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from ..config import UserError
from ..runtime import disk_errors
from .curves import draw_curves
from .examples import Examples, write_examples
#:: block imports ::#
#:: endblock ::#
from .metrics import format_record, truncate_metrics


class Tracker:
    """Records a run in ``run_dir`` on rank 0; on the other ranks, its methods do nothing.

    On a terminal it shows a progress bar; elsewhere it prints a line for each record. At the end it writes the files of
    ``examples``: the curves of the loss and ``best_metric``, whose units are ``units``, and what the loop adds.
    """

    def __init__(self, run_dir: Path, is_main: bool, best_metric: str, units: Mapping[str, str]) -> None:
        self.run_dir, self.is_main, self.best_metric = run_dir, is_main, best_metric
        curves = partial(draw_curves, run_dir, best_metric, units)
        self.examples: dict[str, Callable[[], Any]] = {"curves.png": curves}
        self.shown: dict[str, str] = {}  # Behind the progress bar.
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
        layout = None if total is None else "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{remaining} left{postfix}]"
        is_hidden = not sys.stderr.isatty()
        bar = tqdm(None, "", total, unit="step", initial=done, disable=is_hidden, dynamic_ncols=True, bar_format=layout)
        with ExitStack() as stack:
            self.metrics = stack.enter_context(open(path, "a", encoding="utf-8", buffering=1))
            self.bar = stack.enter_context(bar)
            #:: block open ::#
            #:: endblock ::#
            yield
            write_examples(self.run_dir, self.examples)
            #:: block close ::#
            #:: endblock ::#

    def finish(self, examples: Examples) -> None:
        """Note that the run is complete, and what to show of it in addition to the curves."""
        self.examples |= examples
        #:: block finish ::#
        #:: endblock ::#

    def advance(self) -> None:
        """Count one step."""
        if self.bar is not None:
            self.bar.update()

    def log(self, record: dict[str, Any]) -> None:
        """Write a record (``event``, ``step`` and metrics) to all outputs; raises UserError if the disk is full."""
        if self.metrics is None or self.bar is None:
            return
        try:
            with disk_errors(self.run_dir / "metrics.jsonl"):
                self.metrics.write(format_record(record) + "\n")
        except OSError as error:
            with suppress(OSError):
                self.metrics.close()  # Later, it would try the same write again, and hide this error behind another.
            raise UserError(str(error)) from None
        #:: block log ::#
        #:: endblock ::#
        metrics = "  ".join(
            f"{name} {value:.4g}" for name, value in record.items() if isinstance(value, int | float) and name != "step"
        )
        if record["event"] != "train" or self.bar.disable:
            self.print(f"{record['event']} step {record['step']}  {metrics}")
        self.show(record)

    def show(self, record: dict[str, Any]) -> None:
        """Show the loss, the throughput and the last evaluation behind the progress bar."""
        assert self.bar is not None
        if record["event"] == "train":
            self.shown["loss"] = f"loss {record['loss']:.4g}"
            for unit in ("samples", "tokens"):
                if (rate := record.get(f"{unit}_per_second")) is not None:
                    self.shown["throughput"] = f"{rate:,.0f} {unit}/s"
        elif isinstance(value := record.get(self.best_metric), int | float):
            self.shown["metric"] = f"{self.best_metric.replace('_', ' ')} {value:.4g}"
        self.bar.set_postfix_str(", ".join(self.shown.values()))

    def print(self, text: str) -> None:
        """Print one line, above the progress bar if there is one."""
        if self.is_main:
            tqdm.write(text)
            sys.stdout.flush()
