"""Does it fit? The memory that a step needs on a rank, without the other ranks, their devices or the weights.

    scripts/launch.sh estimate --ranks 64 --memory 80 --model.width 4096

One process runs the model, the strategy, the loss and the optimizer as one of N ranks. Its tensors have shapes, but no
values; its process group sends nothing. A tensor counts from its creation until nothing refers to it. Not counted: what
CUDA and NCCL need, temporary memory inside a kernel, and fragmentation. Attention is that of a CPU.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from copy import deepcopy
from functools import partial
from multiprocessing import get_context
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from .config import Config, UserError
from .dataset import collate_fn
from .distributed import Process
from .evaluate import build_experiment
from .optim import build_optimizer

GIB, OTHERS = 2**30, "activations, buffers, messages"
# Settings that may need less memory and leave the global batch as it is, with their values.
CHANGES = [("train", "activation_checkpointing", True), ("train", "precision", "bf16"), ("parallel", "replicas", 1)]
aten = torch.ops.aten
Storages = list[tuple[ReferenceType[Any], int]]  # What was in use at some time, and its bytes.


def estimate(config: Config, world_size: int, memory: float | None) -> None:
    """Print what a step needs; if it is more than ``memory`` GiB, also what it would need with other settings."""
    config.train.compile = False  # Compiled blocks need about as much.
    # A process simulates one rank and ends, because PyTorch caches process groups.
    with ProcessPoolExecutor(4, get_context("spawn"), max_tasks_per_child=1) as pool:
        ranks, peaks = sorted({0, world_size - 1}), list[float]()  # These two may differ most.
        for at_peak, after_backward in pool.map(partial(simulate, config, world_size), ranks):
            print(f"{f'rank {ranks[len(peaks)]}, GiB':40}at its peak  after backward")
            for kind, size in at_peak.items():
                print(f"  {kind:36}{size / GIB:13.3f}{after_backward[kind] / GIB:16.3f}")
            peaks.append(at_peak["total"] / GIB)
        if memory is None or max(peaks) <= memory:
            limit = "" if memory is None else f", which fits into {memory:g}"
            print(f"{max(peaks):.3f} GiB{limit}; not counted: CUDA, NCCL, workspaces, fragmentation")
            return
        print(f"{max(peaks):.3f} GiB do not fit into {memory:g}; with other settings:")
        is_last = peaks[0] < peaks[-1]
        tables = {
            text: pool.submit(simulate, changed, count, count - 1 if is_last else 0)
            for text, changed, count in change(config, world_size)
        }
        for text, table in tables.items():
            with suppress(UserError):  # These settings do not work together.
                print(f"  {text:38}{table.result()[0]['total'] / GIB:11.3f}", flush=True)


def change(config: Config, world_size: int) -> Iterator[tuple[str, Config, int]]:
    """Yield changes that may need less memory, and the settings and the number of ranks that they lead to."""
    single = config.data.global_batch_size // config.parallel.dp_size(world_size)
    combined = deepcopy(config)
    for section, name, value in [*CHANGES, ("train", "microbatches", single)]:
        if getattr(getattr(config, section), name) != value:
            changed = deepcopy(config)
            for each in (changed, combined):
                setattr(getattr(each, section), name, value)
            yield f"--{section}.{name} {str(value).lower()}", changed, world_size
    yield "all of these", combined, world_size
    yield f"--ranks {2 * world_size}", config, 2 * world_size


class Ledger(FakeTensorMode):
    """In a ``with`` block, computes shapes instead of values, and records what memory is in use.

    PyTorch has no public class for that. A number that a program reads is 1, and a comparison False.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        # Without this memo of weak references, because module.to() moves no parameter that has one.
        self.fake_tensor_converter.set_tensor_memo = lambda *_: None  # type: ignore[method-assign]
        self.in_use: dict[int, tuple[ReferenceType[Any], int]] = {}
        self.peak: Storages = []
        self.bytes = self.peak_bytes = self.depth = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if name is aten._local_scalar_dense and is_fake:
            return torch.full((), args[0].dtype != torch.bool, dtype=args[0].dtype).item()
        # What is computed from values stays a value. PyTorch reads the ranks of a mesh, which come from arange.
        if not is_fake and (tensors or name is aten.arange):
            return func(*args, **kwargs)
        self.depth += 1
        try:
            outputs = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.depth -= 1
        if not self.depth:  # Not an operation that only finds the shape of another.
            self.record([*tensors, *tree_leaves(outputs)])
        return outputs

    def record(self, tensors: list[Any]) -> None:
        """Note the memory of the tensors of an operation."""
        for tensor in tensors:
            if isinstance(tensor, FakeTensor) and tensor.device.type != "meta":
                self.note(tensor.untyped_storage())
        if self.bytes > self.peak_bytes and sum(size for _, size in self.measure()) > self.peak_bytes:
            self.peak, self.peak_bytes = [*self.in_use.values()], self.bytes

    def note(self, storage: Any) -> None:
        """Note the size of a storage, until nothing refers to it."""
        key, size = id(storage), storage.nbytes()
        reference, before = self.in_use.get(key) or (ref(storage, partial(self.forget, key)), 0)
        self.in_use[key] = reference, size
        self.bytes += size - before

    def forget(self, key: int, _: ReferenceType[Any]) -> None:
        """Forget a storage that nothing refers to."""
        self.bytes -= self.in_use.pop(key)[1]

    def measure(self) -> Storages:
        """Return what is in use now; sizes are read again, because gathered weights are freed by resizing them."""
        for reference, _ in [*self.in_use.values()]:
            if (storage := reference()) is not None:
                self.note(storage)
        return [*self.in_use.values()]


class Alone(Process):
    """A rank of a run without the others, from which it gets what it has itself."""

    def on_main(self, action: Callable[[], Any]) -> Any:
        return action()

    def all_gather(self, value: Any) -> list[Any]:
        return [value or ["loss"]] * self.world_size  # A rank without a loss asks for the names of the losses.


def build(config: Config, process: Process) -> tuple[Any, Any, Any, Any]:
    """Return a rank's task, model, optimizer and local batch; all samples have the shape of the first one."""
    task, parallel, train_set, _ = build_experiment(config, process)
    samples = collate_fn([train_set[0]] * (config.data.global_batch_size // parallel.dp_size))
    batch = tree_map_only(Tensor, lambda part: torch.empty(part.shape, dtype=part.dtype), samples)
#:: include "parallelism/" ~ cookiecutter.parallelism ~ "/estimate.py" ignore missing ::#
    return task, parallel, build_optimizer(parallel.module, config.optim), batch


def simulate(config: Config, world_size: int, rank: int) -> tuple[dict[str, int], dict[str, int]]:
    """Take two steps as one of the ranks; returns the bytes in use by kind at the peak, and after backward."""
    config.check(world_size, trains=True)
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    process = Alone(rank, world_size, torch.device("cpu"), dist.group.WORLD, dist.group.WORLD, dist.HashStore())
    with Ledger() as ledger:
        task, parallel, optimizer, batch = build(config, process)
        for _ in range(2):  # The first step creates the optimizer's state.
            optimizer.zero_grad()
            ledger.peak_bytes = 0
            inputs, targets = task.prepare(*batch)
            parallel.forward_backward(inputs, targets, task.weight(targets))
            after_backward = ledger.measure()
            parallel.clip_grad_norm(config.train.clip_grad_norm or math.inf)
            optimizer.step()
        parameters = [*parallel.module.parameters()]
        kinds = {"parameters": parameters, "gradients": [p.grad for p in parameters if p.grad is not None]}
        state = tree_leaves(list(optimizer.state.values()))
        kinds["optimizer state"] = [leaf for leaf in state if isinstance(leaf, Tensor)]
    return divide(ledger.peak, kinds), divide(after_backward, kinds)


def divide(storages: Storages, kinds: dict[str, list[Any]]) -> dict[str, int]:
    """Return the bytes of each kind and their total; what is in none of ``kinds`` is something else."""
    owners = {}
    for kind, tensors in kinds.items():
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            owners[id(local.untyped_storage())] = kind
    sizes = dict.fromkeys([*kinds, OTHERS, "total"], 0)
    for reference, size in storages:
        sizes[owners.get(id(reference()), OTHERS)] += size
        sizes["total"] += size
    return sizes
