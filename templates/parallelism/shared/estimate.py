"""Does it fit? ``scripts/launch.sh estimate --ranks 64 --memory 80`` prints the memory of a rank.

A process takes one step as one of the ranks, on the CPU. Its tensors have shapes, but no values, so
that even a large model takes no memory.
"""

import math
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor

# FakeTensorMode is private, but there is no other way to run operations without values.
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from .config import Config
from .dataset import build_datasets, collate_fn
from .distributed import Process
from .optim import build_optimizer
from .parallel import Parallel
from .task import Task

GIB = 2**30
COLUMNS = ("weights", "gradients", "optimizer", "activations", "peak")


def estimate(config: Config, world_size: int, memory: float | None) -> None:
    """Print the memory of a rank, and whether it fits into ``memory`` GiB."""
    # Compiled blocks need about as much memory as others.
    config.train.compile = False
    largest_peak = 0.0
    print(f"{'GiB':9}", *(f"{name:>11}" for name in COLUMNS))
    # DTensor caches process groups, so every rank is simulated in a fresh process.
    with ProcessPoolExecutor(max_tasks_per_child=1) as pool:
        #:: if fact("stages") ::#
        ranks = choose_ranks(config, world_size)
        #:: else ::#
        # All ranks have shards of the same sizes.
        ranks = range(1)
        #:: endif ::#
        simulations = [pool.submit(simulate, config, world_size, rank) for rank in ranks]
        for rank, simulation in zip(ranks, simulations, strict=True):
            sizes_in_gib = [size / GIB for size in simulation.result()]
            print(f"rank {rank:<4}", *(f"{size:11.4g}" for size in sizes_in_gib), flush=True)
            largest_peak = max(largest_peak, sizes_in_gib[-1])
    verdict = ""
    if memory is not None:
        fits = "fit" if largest_peak <= memory else "do not fit"
        verdict = f" {fits} into {memory:g}"
    caveat = "not counted: CUDA, NCCL, fragmentation. Gradients may follow a peak."
    print(f"{largest_peak:.4g} GiB{verdict}; {caveat}")


#:: if fact("stages") ::#
def choose_ranks(config: Config, world_size: int) -> range:
    """Return one rank of each position in a pipeline: all ranks there have the same blocks."""
    positions = config.parallel.pipeline
    if positions == 0:
        # All ranks of a replica are one pipeline, so its length follows from the others.
        positions = world_size // config.parallel.dp_size(world_size)
    return range(0, world_size, world_size // positions)


#:: endif ::#
class MemoryTracker(FakeTensorMode):
    """Computes shapes instead of values, and measures after each operation which memory is in use.

    Attributes:
        peak: The most bytes that were in use at once, since ``reset_peak`` was called.
        sizes_at_peak: The bytes of each storage at that moment, by a weak reference to it.
    """

    def __init__(self) -> None:
        # Tensors that exist already may be inputs of an operation too.
        super().__init__(allow_non_fake_inputs=True)
        # The mode would keep a weak reference to every tensor that it converts, and module.to()
        # moves no parameter that has one.
        self.fake_tensor_converter.set_tensor_memo = lambda *_: None  # type: ignore[method-assign]
        self.storages = WeakSet[Any]()
        self.running_operations = 0
        self.reset_peak()

    def reset_peak(self) -> None:
        """Forget what has been measured."""
        self.peak = 0
        self.sizes_at_peak = dict[ref[Any], int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation; PyTorch calls this method for each of them."""
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        has_fake_input = any(isinstance(tensor, FakeTensor) for tensor in inputs)
        if has_fake_input and func.overloadpacket is torch.ops.aten._local_scalar_dense:
            return self.make_up_number(args[0].dtype)
        if not has_fake_input and self.stays_real(func, inputs):
            return func(*args, **kwargs)
        # To find the shape of a result, the mode may run other operations, which call this method
        # again. They would not run in training, so only the outermost one is measured.
        self.running_operations += 1
        try:
            outputs = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.running_operations -= 1
        if self.running_operations == 0:
            self.measure(outputs)
        return outputs

    def stays_real(self, func: Any, inputs: list[Tensor]) -> bool:
        """Return whether an operation without fake inputs computes values.

        What is computed from values stays a value: the setup reads it, such as the ranks of a mesh,
        which come from ``arange``. Other operations without inputs, such as ``empty``, allocate
        memory that a run would allocate too, so their results are fake.
        """
        return len(inputs) > 0 or func.overloadpacket is torch.ops.aten.arange

    def make_up_number(self, dtype: torch.dtype) -> Any:
        """Return what Python gets when it reads a number, such as by ``item()``, of a fake tensor.

        A tensor without values has no number. False passes checks such as ``isnan().any()``, and 1
        can be divided by.
        """
        if dtype == torch.bool:
            return False
        return torch.ones((), dtype=dtype).item()

    def measure(self, outputs: Any) -> None:
        """Add the storages of an operation's outputs to those in use, and keep a new peak."""
        for output in tree_leaves(outputs):
            # A tensor on the meta device takes no memory in a run either.
            if isinstance(output, FakeTensor) and output.device.type != "meta":
                self.storages.add(output.untyped_storage())
        # Storages that nobody holds have left the WeakSet. All others are measured again, because
        # FSDP2 frees gathered weights by resizing their storages to 0 bytes.
        in_use = sum(storage.nbytes() for storage in self.storages)
        if in_use > self.peak:
            self.peak = in_use
            self.sizes_at_peak = measure_storages(self.storages)


def measure_storages(storages: Iterable[Any]) -> dict[ref[Any], int]:
    """Return the bytes of storages, by weak references that do not keep them in memory."""
    return {ref(storage): storage.nbytes() for storage in storages}


def simulate(config: Config, world_size: int, rank: int) -> list[int]:
    """Take a step as one of the ranks; returns the bytes of each of COLUMNS."""
    # Collectives of this backend return at once, and leave their outputs as they are.
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    process = Process(dist.HashStore(), rank, world_size, cpu_group=dist.group.WORLD)
    with MemoryTracker() as tracker:
        train_set, _, _ = build_datasets(config)
        task = Task(config, process.device)
        parallel = Parallel(config, process)
        optimizer = build_optimizer(parallel.module, config.optim)
        batch = build_batch(train_set, config.data.global_batch_size // parallel.dp_size)
        create_optimizer_state(parallel, optimizer)
        tracker.reset_peak()
        take_step(config, task, parallel, optimizer, batch)
    dist.destroy_process_group()
    return sum_by_kind(parallel, optimizer, tracker)


def build_batch(train_set: Any, batch_size: int) -> Any:
    """Return a batch with the shapes of a real one, and without values."""
    samples = collate_fn([train_set[0]] * batch_size)
    return tree_map_only(Tensor, lambda part: torch.empty(part.shape, dtype=part.dtype), samples)


def create_optimizer_state(parallel: Parallel, optimizer: Optimizer) -> None:
    """Take an optimizer step that is not measured: state such as AdamW's moments begins there."""
    for parameter in parallel.module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    # The first time, DTensor runs operations on whole tensors, to find out the shapes of results.
    parallel.clip_grad_norm(1.0)
    optimizer.step()
    optimizer.zero_grad()


def take_step(
    config: Config, task: Task, parallel: Parallel, optimizer: Optimizer, batch: Any
) -> None:
    """Take one step as the training loop does, and leave the gradients there."""

    def mean_loss(outputs: Any, targets: Any) -> Tensor:
        return task.losses(outputs, targets)["loss"] / task.weight(targets)

    inputs, targets = task.prepare(*batch)
    parallel.forward_backward(inputs, targets, mean_loss)
    parallel.clip_grad_norm(config.train.clip_grad_norm or math.inf)
    optimizer.step()


def sum_by_kind(parallel: Parallel, optimizer: Optimizer, tracker: MemoryTracker) -> list[int]:
    """Return the bytes of weights, gradients and optimizer state, of all else, and the peak."""
    parameters = list(parallel.module.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    state = tree_leaves(list(optimizer.state.values()))
    totals = []
    counted = set[ref[Any]]()
    for tensors in (parameters, gradients, state):
        sizes = measure_storages(get_storage(tensor) for tensor in tensors)
        totals.append(sum(sizes.values()))
        counted.update(sizes)
    # Whatever else is in use at the peak counts as activations, gathered weights included.
    at_peak = tracker.sizes_at_peak.items()
    activations = sum(size for storage, size in at_peak if storage not in counted)
    return [*totals, activations, tracker.peak]


def get_storage(tensor: Tensor) -> Any:
    """Return the storage of a tensor, or of this rank's shard of it."""
    local_tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local_tensor.untyped_storage()
