"""What a run tells: ``metrics.jsonl``, progress on the terminal, and curves in the end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from .config import Config
from .curves import cut_metrics, draw_curves
from .distributed import World


class Tracker:
    """Records a run, on rank 0; on the other ranks all of its methods do nothing.

    On a terminal it shows a progress bar, elsewhere a line for each record.

    Args:
        config: The run's settings.
        world: This process's place.
        done: Steps that were done before; later records are those of a run that was interrupted, and are dropped.
        total: Steps of the whole run.
    """

    def __init__(self, config: Config, world: World, done: int, total: int) -> None:
        self.is_main = world.is_main
        if not self.is_main:
            return
        self.folder = Path(config.run.dir)
        cut_metrics(self.folder / "metrics.jsonl", done)
        self.metrics = open(self.folder / "metrics.jsonl", "a", encoding="utf-8", buffering=1)
        self.bar = tqdm(total=total, initial=done, unit="step", disable=not sys.stderr.isatty(), dynamic_ncols=True)
        #:: block start ::#
        #:: endblock ::#
        self.say(f"{config.run.dir}: step {done} of {total} on {world.size} rank(s), {world.device.type}")

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_main:
            return
        self.bar.close()
        self.metrics.close()
        #:: block end ::#
        #:: endblock ::#
        if error is None:
            draw_curves(self.folder / "metrics.jsonl", self.folder / "curves.png")

    def advance(self) -> None:
        """Count one step."""
        if self.is_main:
            self.bar.update()

    def log(self, record: dict[str, Any]) -> None:
        """Write ``record`` (``event``, ``step`` and figures) to all places."""
        if not self.is_main:
            return
        self.metrics.write(json.dumps(record) + "\n")
        #:: block log ::#
        #:: endblock ::#
        figures = "  ".join(
            f"{name} {value:.4g}" for name, value in record.items() if isinstance(value, int | float) and name != "step"
        )
        if record["event"] == "train" and not self.bar.disable:
            self.bar.set_postfix_str(f"loss {record['loss']:.4g}")
        else:
            self.say(f"{record['event']} step {record['step']}  {figures}")

    def say(self, text: str) -> None:
        """Print one line, above the progress bar where there is one."""
        if self.is_main:
            tqdm.write(text)
            sys.stdout.flush()
