"""How long an asynchronous save of a rendered project keeps training waiting, and how long torch.save would take.

Both write the same weights and optimizer state to the same disk; prints the seconds of each as one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch


def main() -> None:
    project, *settings = sys.argv[1:]
    (source,) = Path(project, "src").iterdir()
    sys.path.insert(0, str(source.parent))
    train = import_module(f"{source.name}.train")

    def measure(trainer: Any) -> bool:
        batch = next(iter(trainer.loader))
        for _ in range(2):
            trainer.step(*batch)
        trainer.checkpointer.run_dir.joinpath("checkpoints").mkdir(exist_ok=True)
        state, stalls, plain = trainer.checkpointer.state(), [], []
        for number in range(3):
            trainer.progress.step = number + 1
            trainer.guard.begin(0, 0)
            start = time.perf_counter()
            trainer.write_checkpoint()
            stalls.append(time.perf_counter() - start)
            trainer.checkpointer.wait()
            torch.distributed.barrier()
            start = time.perf_counter()
            if trainer.process.is_main:
                torch.save(state, trainer.checkpointer.run_dir / "plain.pt")
                plain.append(time.perf_counter() - start)
            torch.distributed.barrier()
        stall = torch.tensor(stalls)
        torch.distributed.all_reduce(stall, torch.distributed.ReduceOp.MAX)  # The others wait for the slowest.
        if trainer.process.is_main:
            size = sum(tensor.nbytes for tensor in state.values()) / 2**20
            print(json.dumps({"stall": stall.min().item(), "plain": min(plain), "mebibytes": round(size)}), flush=True)
        return False

    train.Trainer.run = measure
    import_module(f"{source.name}.__main__").main(["train", *settings])


if __name__ == "__main__":
    main()
