"""A rendered project that goes without logging, stop agreement, seeding and progress in every other block of steps.

Both kinds of blocks alternate in one process, so whatever else the machine does slows both alike. The last line says
what these take together, as a share of a step without them: the median over the pairs of blocks.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

BLOCK = 20  # Steps; a log record is written every ten.


def nothing(*_: Any, **__: Any) -> None:
    """Take the place of what is left out."""


class Blocks:
    """Leaves them out or puts them back after each block, and keeps the seconds of all blocks after the warm-up."""

    def __init__(self, package: str, warm_up: int) -> None:
        names = "splitting.seeding", "runtime.stop_signal", "reporting.tracker", "train"
        seeding, stop_signal, tracker, train = (import_module(f"{package}.{name}") for name in names)
        left_out = [
            (seeding, "seed_generators", nothing),
            (seeding, "restored_generators", nullcontext),
            (stop_signal.StopSignal, "agree", nullcontext),
            (tracker.Tracker, "advance", nothing),
            (train.Trainer, "log", nothing),
        ]
        self.whole = [(owner, name, getattr(owner, name)) for owner, name, _ in left_out]
        self.bare, self.warm_up = left_out, warm_up
        self.seconds: list[float] = []
        self.began_at = time.perf_counter()

    def end_step(self, trainer: Any) -> None:
        """Note the time if a block ends with this step, and begin one of the other kind."""
        step = trainer.progress.step
        if step < self.warm_up or (step - self.warm_up) % BLOCK:
            return
        seconds = time.perf_counter() - self.began_at
        if step > self.warm_up:
            self.seconds.append(seconds)
        is_bare = len(self.seconds) % 2 == 1
        for owner, name, value in self.bare if is_bare else self.whole:
            setattr(owner, name, value)
        if self.seconds and not is_bare:
            trainer.stop.began_at += seconds  # The time between two messages, without a block that had none.
        self.began_at = time.perf_counter()

    def share(self) -> float:
        """Return what is left out every other time as a share of a step without it."""
        return statistics.median(map(float.__truediv__, self.seconds[::2], self.seconds[1::2])) - 1


def main() -> None:
    project, warm_up, *settings = sys.argv[1:]
    (source,) = Path(project, "src").iterdir()
    sys.path.insert(0, str(source.parent))
    trainer = import_module(f"{source.name}.train").Trainer
    run, run_step = trainer.run, trainer.run_step
    blocks = Blocks(source.name, int(warm_up))

    def step_in_block(self: Any, *batch: Any) -> None:
        run_step(self, *batch)
        blocks.end_step(self)

    def run_blocks(self: Any) -> Any:
        stopped = run(self)
        if self.process.is_main:
            print(json.dumps({"share": blocks.share(), "pairs": len(blocks.seconds) // 2}), flush=True)
        return stopped

    trainer.run, trainer.run_step = run_blocks, step_in_block
    import_module(f"{source.name}.__main__").main(["train", *settings])


if __name__ == "__main__":
    main()
