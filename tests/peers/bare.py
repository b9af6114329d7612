"""A rendered project without its logging, stop agreement, seeding of samples and progress: what these take together."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any


def nothing(*_: Any, **__: Any) -> None:
    """Take the place of what is left out."""


def leave_out(package: str, logged: set[int]) -> None:
    """Leave it out from the start of training on; only the steps ``logged`` have a record, between which time runs."""
    seeding, stop_signal, tracker, train = (
        import_module(f"{package}.{name}")
        for name in ("splitting.seeding", "runtime.stop_signal", "reporting.tracker", "train")
    )
    train_all, log_step = train.Trainer.run, train.Trainer.log

    def run(self: Any) -> Any:
        seeding.seed_generators = nothing
        seeding.restored_generators = stop_signal.StopSignal.agree = nullcontext
        tracker.Tracker.advance = nothing
        return train_all(self)

    def log(self: Any, *values: Any) -> None:
        if self.progress.step in logged:
            log_step(self, *values)

    train.Trainer.run, train.Trainer.log = run, log


def main() -> None:
    project, logged, *settings = sys.argv[1:]
    (source,) = Path(project, "src").iterdir()
    sys.path.insert(0, str(source.parent))
    leave_out(source.name, set(map(int, logged.split(","))))
    import_module(f"{source.name}.__main__").main(["train", *settings])


if __name__ == "__main__":
    main()
