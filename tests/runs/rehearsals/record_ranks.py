"""Write what a rank sends in its second step and holds after it: in a real run, and as rehearsed.

record_ranks.py OUTPUT real train ...      one rank of a real run, started by torchrun
record_ranks.py OUTPUT RANKS train ...     each rank as scripts/rehearse.py runs it
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path[:0] = ["src", "scripts"]
rehearse: Any = import_module("rehearse")


class Recorder(TorchDispatchMode):
    """Records messages of operations on values."""

    record = rehearse.Recorder.record

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor runs operations on shards, which come here.
        outputs = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self.record(func, args, inputs, outputs)
        return outputs


def write(output: str, rank: int, messages: list[Any], sizes: list[int]) -> None:
    """Write the calls, dimensions and bytes of messages, and the bytes of weights, gradients and optimizer state."""
    content = {"messages": [[m.call, m.dimension, m.num_bytes] for m in messages], "sizes": sizes[:3]}
    Path(f"{output}-{rank}.json").write_text(json.dumps(content))


def record_run(output: str, words: list[str]) -> None:
    """Train, and record the second step."""
    trainer = rehearse.train.Trainer
    train_step = trainer.train_step

    def recorded(self: Any, batch: Any) -> Any:
        if self.step != 1:
            return train_step(self, batch)
        with Recorder() as recorder:
            losses = train_step(self, batch)
        # The step has freed its gradients: they are as large as the weights, all of which are trained.
        weights, state = list(self.parallel.module.parameters()), list(self.optimizer.state.values())
        sizes = [rehearse.count_bytes(tensors) for tensors in (weights, weights, state)]
        write(output, self.process.rank, recorder.messages, sizes)
        return losses

    trainer.train_step = recorded
    import_module(f"{rehearse.PACKAGE}.__main__").main(words)


def record_rehearsal(output: str, world_size: int, words: list[str]) -> None:
    """Rehearse each rank."""
    _, config, _ = import_module(f"{rehearse.PACKAGE}.__main__").parse(words)
    for rank in range(world_size):
        process = get_context("fork").Process(target=rehearse_rank, args=(output, config, world_size, rank))
        process.start()
        process.join()


def rehearse_rank(output: str, config: Any, world_size: int, rank: int) -> None:
    _, step, sizes, _ = rehearse.rehearse_rank(config, world_size, rank)
    write(output, rank, step, sizes)


if __name__ == "__main__":
    _, output, ranks, *words = sys.argv
    if ranks == "real":
        record_run(output, words)
    else:
        record_rehearsal(output, int(ranks), words)
