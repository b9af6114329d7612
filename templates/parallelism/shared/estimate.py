"""Does it fit? The memory of a step on a rank: ``scripts/launch.sh estimate --ranks 64 --memory 80``.

One process takes a step as one of N ranks, with tensors that have shapes but no values (FakeTensorMode is private).
"""

import math
#:: if fact("caches_groups") ::#
from concurrent.futures import ProcessPoolExecutor
#:: endif ::#
from typing import Any
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from .config import Config
from .dataset import build_datasets, collate_fn
from .distributed import Process
from .optim import build_optimizer
from .parallel import Parallel
from .task import Task

GIB, COLUMNS = 2**30, ("weights", "gradients", "optimizer", "activations", "peak")  # Activations: all else.


def estimate(config: Config, world_size: int, memory: float | None) -> None:
    """Print the memory of a rank, and whether it fits into ``memory`` GiB."""
    config.train.compile = False  # Compiled blocks need about as much.
    #:: if file("parallelism", "ranks.py") ::#
    #:: filter indent(4, true) ::#
    #:: include "parallelism/" ~ cookiecutter.parallelism ~ "/ranks.py" ::#
    #:: endfilter ::#
    #:: else ::#
    ranks, peaks = range(1), list[float]()  # No rank takes more.
    #:: endif ::#
    print(f"{'GiB':9}", *(f"{name:>11}" for name in COLUMNS))
    for rank in ranks:
        #:: if fact("caches_groups") ::#
        sizes = [size / GIB for size in pool.submit(simulate, config, world_size, rank).result()]
        #:: else ::#
        sizes = [size / GIB for size in simulate(config, world_size, rank)]
        #:: endif ::#
        print(f"rank {rank:<4}", *(f"{size:11.4g}" for size in sizes), flush=True)
        peaks.append(sizes[-1])
    verdict = "" if memory is None else f" {'fit' if max(peaks) <= memory else 'do not fit'} into {memory:g}"
    print(f"{max(peaks):.4g} GiB{verdict}; not counted: CUDA, NCCL, fragmentation. Gradients may follow a peak.")


class Ledger(FakeTensorMode):
    """Computes shapes instead of values, and records the peak of memory; a number that is read is 1."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        # No memo of weak references: module.to() moves no parameter that has one.
        self.fake_tensor_converter.set_tensor_memo = lambda *_: None  # type: ignore[method-assign]
        self.storages, self.at_peak, self.depth = WeakSet[Any](), dict[ref[Any], int](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if name is torch.ops.aten._local_scalar_dense and is_fake:
            return torch.full((), args[0].dtype != torch.bool, dtype=args[0].dtype).item()
        # What is computed from values stays a value, such as the ranks of a mesh, from arange.
        if not is_fake and (tensors or name is torch.ops.aten.arange):
            return func(*args, **kwargs or {})
        self.depth += 1
        try:
            outputs = super().__torch_dispatch__(func, types, args, kwargs or {})
        finally:
            self.depth -= 1
        if not self.depth:  # Not an operation that only finds the shape of another.
            fakes = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, FakeTensor)]
            self.storages.update(fake.untyped_storage() for fake in fakes if fake.device.type != "meta")
            # Gathered weights are freed by resizing their storage.
            in_use = {ref(storage): storage.nbytes() for storage in self.storages}
            self.at_peak = max(self.at_peak, in_use, key=lambda sizes: sum(sizes.values()))
        return outputs


def simulate(config: Config, world_size: int, rank: int) -> list[int]:
    """Take a step as one of the ranks; returns the bytes of COLUMNS."""
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    process = Process(dist.HashStore(), rank, world_size, cpu_group=dist.group.WORLD)
    with Ledger() as ledger:
        (train_set, *_), task = build_datasets(config), Task(config, process.device)
        parallel = Parallel(config, process)
        samples = collate_fn([train_set[0]] * (config.data.global_batch_size // parallel.dp_size))
        batch = tree_map_only(Tensor, lambda part: torch.empty(part.shape, dtype=part.dtype), samples)
        optimizer, parameters = build_optimizer(parallel.module, config.optim), [*parallel.module.parameters()]
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        parallel.clip_grad_norm(1.0)  # At first, DTensor computes shapes of whole tensors.
        optimizer.step()  # Creates its state.
        optimizer.zero_grad()
        ledger.at_peak = {}
        inputs, targets = task.prepare(*batch)
        parallel.forward_backward(inputs, targets, lambda *parts: task.losses(*parts)["loss"] / task.weight(parts[1]))
        parallel.clip_grad_norm(config.train.clip_grad_norm or math.inf)
        optimizer.step()
    dist.destroy_process_group()
    groups = (parameters, [p.grad for p in parameters if p.grad is not None], tree_leaves([*optimizer.state.values()]))
    shards = [[each.to_local() if isinstance(each, DTensor) else each for each in tensors] for tensors in groups]
    kinds = [{ref(storage): storage.nbytes() for storage in map(Tensor.untyped_storage, part)} for part in shards]
    others = [size for key, size in ledger.at_peak.items() if not any(key in sizes for sizes in kinds)]
    return [*(sum(sizes.values()) for sizes in kinds), sum(others), sum(ledger.at_peak.values())]
