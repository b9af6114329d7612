"""Does it fit? ``launch.sh estimate --ranks 64 --memory 80`` takes a step that has no values."""

import math
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
    config.train.compile = False  # Compiled blocks need about as much memory.
    largest_peak = 0.0
    print(f"{'GiB':9}", *(f"{name:>11}" for name in COLUMNS))
    with ProcessPoolExecutor(max_tasks_per_child=1) as pool:  # DTensor caches process groups.
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
    if memory:
        fits = "fit" if largest_peak <= memory else "do not fit"
        verdict = f" {fits} into {memory:g}"
    caveat = "not counted: CUDA, NCCL, fragmentation. The peak may come before all gradients exist."
    print(f"{largest_peak:.4g} GiB{verdict}; {caveat}")


#:: if fact("stages") ::#
def choose_ranks(config: Config, world_size: int) -> range:
    """Return one rank of each position in a pipeline: all ranks there have the same blocks."""
    positions = config.parallel.pipeline or world_size // config.parallel.dp_size(world_size)
    return range(0, world_size, world_size // positions)


#:: endif ::#
class MemoryTracker(FakeTensorMode):
    """Computes shapes instead of values, and measures the memory in use after each operation."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        # The mode would keep weak references to parameters, and module.to() cannot move those.
        self.fake_tensor_converter.set_tensor_memo = lambda *_: None  # type: ignore[method-assign]
        self.storages = WeakSet[Any]()
        self.running_operations = 0
        self.reset_peak()

    def reset_peak(self) -> None:
        """Forget the most bytes in use at once, and those of each storage at that time."""
        self.peak = 0
        self.sizes_at_peak = dict[ref[Any], int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation; PyTorch calls this method for each of them."""
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        has_fake_input = any(isinstance(tensor, FakeTensor) for tensor in inputs)
        if has_fake_input and func.overloadpacket is torch.ops.aten._local_scalar_dense:
            # Python reads a number that is not there: False for a bool, and 1 for what may divide.
            return int(args[0].dtype != torch.bool)
        # Operations on values stay real, as do those on a DTensor, whose shards have none. A mesh
        # reads its ranks from arange.
        is_arange = func.overloadpacket is torch.ops.aten.arange
        if not has_fake_input and (inputs or is_arange):
            return func(*args, **kwargs)
        self.running_operations += 1  # The mode may call this again: the outermost call counts.
        try:
            outputs = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.running_operations -= 1
        if self.running_operations == 0:
            self.measure(outputs)
        return outputs

    def measure(self, outputs: Any) -> None:
        """Add the storages of an operation's outputs to those in use, and keep a new peak."""
        for output in tree_leaves(outputs):
            if isinstance(output, FakeTensor) and output.device.type != "meta":
                self.storages.add(output.untyped_storage())
        # All are measured again: FSDP2 frees gathered weights by resizing their storages to 0.
        in_use = sum(storage.nbytes() for storage in self.storages)
        if in_use > self.peak:
            self.peak = in_use
            self.sizes_at_peak = {ref(storage): storage.nbytes() for storage in self.storages}


def simulate(config: Config, world_size: int, rank: int) -> list[int]:
    """Take a step as one of the ranks; returns the bytes of each of COLUMNS."""
    # Collectives of this backend return at once, and leave their outputs as they are.
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    process = Process(dist.HashStore(), rank, world_size, cpu_group=dist.group.WORLD)
    config.divide_batch({}, world_size)
    with MemoryTracker() as tracker:
        train_set, _, _ = build_datasets(config)
        task = Task(config, process.device)
        parallel = Parallel(config, process)
        optimizer = build_optimizer(parallel.module, config.optim)
        for group in optimizer.param_groups:
            group["foreach"] = False  # An accelerator's fused kernel has no temporary tensors.

        def mean_loss(outputs: Any, targets: Any) -> Tensor:
            return task.losses(outputs, targets)["loss"] / task.weight(targets)

        def remove_values(tensor: Tensor) -> Tensor:
            return torch.empty(tensor.shape, dtype=tensor.dtype)

        samples = [train_set[0]] * (config.data.global_batch_size // config.data.num_microbatches)
        batch = tree_map_only(Tensor, remove_values, collate_fn(samples))
        # In its first step, DTensor runs each operation on whole tensors, too: this must not count.
        for parameter in parallel.module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        parallel.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        tracker.reset_peak()
        microbatches = [task.prepare(*task.augment(*batch)) for _ in parallel.microbatches]
        parallel.forward_backward(microbatches, mean_loss)
        parallel.clip_grad_norm(config.train.clip_grad_norm or math.inf)
        optimizer.step()
    dist.destroy_process_group()
    return sum_by_kind(parallel, optimizer, tracker)


def sum_by_kind(parallel: Parallel, optimizer: Optimizer, tracker: MemoryTracker) -> list[int]:
    """Return the bytes of weights, gradients, optimizer state and all else, and the peak."""
    parameters = list(parallel.module.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    state = tree_leaves(list(optimizer.state.values()))
    totals = []
    counted = set[ref[Any]]()
    for tensors in (parameters, gradients, state):
        total = 0
        for tensor in tensors:
            local_tensor: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local_tensor.untyped_storage()
            if ref(storage) not in counted:
                total += storage.nbytes()
                counted.add(ref(storage))
        totals.append(total)
    at_peak = tracker.sizes_at_peak.items()
    activations = sum(size for reference, size in at_peak if reference not in counted)
    return [*totals, activations, tracker.peak]
