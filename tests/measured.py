"""What a step of a rendered project takes on real ranks, beside what `plan` says; `test_plan.py` starts this program.

Each of the ranks takes part in groups of 1, 2 and 4 of them, one group after the other. Measured are the bytes of all
storages that are alive after each operation (PyTorch's profiler does not see what gloo's threads free), and the
collectives that reach the dispatcher.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

from lab import Lab, batches
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

STEPS = 3  # As many as `plan` takes.
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send", "recv")


SUBCLASSES = (DTensor, AsyncCollectiveTensor)  # Their operations end in others, on plain tensors.


class Memory(TorchDispatchMode):
    """Finds the most bytes that the storages of tensors take after an operation, since ``peak`` was set to 0.

    Without those that were there when ``ignore_all`` was called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages, self.ignored, self.peak = WeakIdKeyDictionary(), WeakIdKeyDictionary(), 0

    def ignore_all(self) -> None:
        self.ignored.update(self.storages)
        self.storages.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, SUBCLASSES) for kind in types):
            return NotImplemented
        outputs = func(*args, **(kwargs or {}))
        for storage in (leaf.untyped_storage() for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)):
            # DTensor finds the shapes of results with tensors that say that they are on the CPU, and have no memory.
            if storage.device.type == "cpu" and storage not in self.ignored:
                self.storages[storage] = None
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self.storages))  # FSDP changes their sizes.
        return outputs


class Collectives(TorchDispatchMode):
    """Counts collectives with more than one rank, and the bytes of the largest tensor in each."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.world_size, self.counts = world_size, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, SUBCLASSES) for kind in types):
            return NotImplemented
        outputs = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.strip("_").removesuffix("_base").removesuffix("_into_tensor")
        name = name.removesuffix("_tensor").replace("allreduce", "all_reduce").replace("allgather", "all_gather")
        if func.namespace in ("c10d", "_c10d_functional") and name in KINDS and self.world_size > 1:
            size = max(map(count_bytes, (args[0], () if name == "all_reduce" else args[1], outputs)))
            self.counts[name] += 1
            self.counts[f"{name} bytes"] += size
        return outputs


def count_bytes(tensors: Any) -> int:
    """Return the bytes of tensors in any nesting."""
    return sum(leaf.nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))


def measure(lab: Lab, words: list[str]) -> dict[str, Any]:
    """Return the most bytes that tensors took in the first steps, and the collectives of the last one."""
    dataset = lab.module("dataset")
    with Memory() as memory:
        datasets = dataset.build_datasets(lab.settings(*words))
        memory.ignore_all()  # What samples are read from is on the host.
        with mock.patch.object(dataset, "build_datasets", return_value=datasets):
            trainer = lab.trainer(*words)
        ((inputs, targets),) = batches(trainer, 1)
        memory.peak = 0
        for _ in range(STEPS):
            trainer.step(inputs, targets)
    with Collectives(lab.process.world_size) as collectives:
        trainer.step(inputs, targets)
    return {"peak": memory.peak, "messages": dict(collectives.counts)}


def foretell(lab: Lab, words: list[str], ranks: int) -> dict[str, Any]:
    """Return what `plan` says of each rank, in the same form."""
    plan, config = lab.module("plan"), lab.settings(*words)
    options = lab.module("launch").PlanOptions(ranks)
    _, roles = plan.simulate_all(plan.Project(lab.module("train"), config, options))
    found = {}
    for role in roles:
        counts = Counter[str]()
        for message in role.figures.messages:
            counts[message.name] += 1
            counts[f"{message.name} bytes"] += message.size
        found |= {rank: {"peak": role.figures.peak, "messages": dict(counts)} for rank in role.ranks}
    return found


def main(package: str, task: str, folder: Path, sizes: str, *words: str) -> None:
    """Measure groups of each size, and write what was measured, and what `plan` says, into the folder."""
    rank, lab = int(os.environ["RANK"]), Lab(package, task, folder)
    runtime, launch, found = lab.module("runtime"), lab.module("launch"), {}
    launch.end_with_launcher(launch.find_process_info())
    for ranks in map(int, sizes.split(",")):
        if rank < ranks:
            os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            own = [*words, "--distributed.init_method", f"file://{folder}/store{ranks}"]
            with runtime.process_group(lab.settings(*own).distributed, devices_per_rank=1) as lab.process:
                found[ranks] = measure(lab, own)
    (folder / f"measured{rank}.json").write_text(json.dumps(found))
    if rank == 0:
        said = {ranks: foretell(lab, list(words), ranks) for ranks in map(int, sizes.split(","))}
        (folder / "plan.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
