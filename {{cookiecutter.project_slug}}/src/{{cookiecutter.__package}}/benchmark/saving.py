"""What a checkpoint costs, in both formats: how long it takes until it is complete, and training stands still."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..runtime import Process, all_gather_object, new_patient_group, on_main, remove

SAVES = 2  # The last one is measured: the first also makes connections and plans.


def measure_saves(trainer: Any, folder: Path, process: Process) -> dict[str, dict[str, float]]:
    """Save to a folder that is removed afterwards; returns the seconds of the slowest rank by format. A collective."""
    checkpointer = trainer.checkpointer
    config = checkpointer.config
    checkpointer.group = checkpointer.group or new_patient_group(config.timeout_seconds)
    checkpointer.run_dir = folder
    on_main(lambda: remove(folder))  # A killed benchmark left it.
    measured = {}
    try:
        for kind in ("full", "sharded"):
            checkpointer.config = replace(config, format=kind, keep=1)
            for _ in range(SAVES):
                measured[kind] = measure_save(trainer)
            measured[kind]["mib"] = on_main(lambda: round(bytes_in(folder / "checkpoints") / 2**20, 2))
            on_main(lambda: remove(folder))
    finally:
        if process.is_main:  # The disk may be full.
            remove(folder)
    return measured


def measure_save(trainer: Any) -> dict[str, float]:
    """Save once, as the training loop does; a collective."""
    trainer.progress.step += 1  # Its name.
    start = time.perf_counter()
    trainer.write_checkpoint()
    stall = time.perf_counter() - start
    trainer.checkpointer.wait()
    seconds = time.perf_counter() - start
    stalls, totals = zip(*all_gather_object((stall, seconds)), strict=True)
    return {"seconds": round(max(totals), 4), "stall_seconds": round(max(stalls), 4)}


def bytes_in(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
