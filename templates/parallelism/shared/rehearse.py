"""Rehearse a run as N ranks on a CPU: one by one, without values; then replay their messages."""

import math
import os
import sys
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from traceback import walk_stack
from typing import Any, NamedTuple
from unittest.mock import DEFAULT, patch
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode  # Private: there is no other way.
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

PACKAGE = "{{ cookiecutter.__package }}"
NAMES = ("dataset", "distributed", "experiment", "parallel", "sharded", "train")
MODULES = [import_module(f"{PACKAGE}.{name}") for name in NAMES]
dataset, distributed, experiment, parallel, sharded, train = MODULES


class Message(NamedTuple):
    """A call by which a rank sends or receives."""

    rank: int
    call: str  # The operation and its tensors, which are alike on all members.
    dimension: str  # Of the mesh, if the group has one.
    group: str
    members: tuple[int, ...]  # Of a send or a receive: the rank that sends, and the one that gets.
    num_bytes: int
    line: str  # Where in the project.


class Recorder(FakeTensorMode):
    """Computes shapes instead of values, and records messages and the most memory in use."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        # The mode would keep weak references to parameters, and module.to() cannot move those.
        self.fake_tensor_converter.set_tensor_memo = lambda *_: None
        self.messages = list[Message]()
        self.storages = WeakSet[Any]()
        self.running_operations = 0
        self.peak = self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation; PyTorch calls this method for each of them."""
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        has_fake_input = any(isinstance(tensor, FakeTensor) for tensor in inputs)
        if has_fake_input and func.overloadpacket is torch.ops.aten._local_scalar_dense:
            # Python reads a number that is not there: False for a bool, and 1 for what may divide.
            return int(args[0].dtype != torch.bool)
        # Operations on values stay real, and those on DTensors; a mesh reads its ranks from arange.
        if not has_fake_input and (inputs or func.overloadpacket is torch.ops.aten.arange):
            outputs = func(*args, **kwargs)
        else:
            self.running_operations += 1  # The mode may call this again, from inside.
            try:
                outputs = super().__torch_dispatch__(func, types, args, kwargs)
            except RuntimeError as error:  # Its own type of error cannot leave this process.
                raise RuntimeError(f"{func}: {error}") from error
            finally:
                self.running_operations -= 1
        if self.running_operations == 0:
            if has_fake_input and func.overloadpacket in flop_registry:
                self.flops += flop_registry[func.overloadpacket](*args, **kwargs, out_val=outputs)
            for output in tree_leaves(outputs):
                if isinstance(output, FakeTensor) and output.device.type != "meta":
                    self.storages.add(output.untyped_storage())
            # All are measured again: FSDP2 frees gathered weights by resizing their storages to 0.
            self.peak = max(self.peak, sum(storage.nbytes() for storage in self.storages))
            self.record(func, args, inputs, outputs)
        return outputs

    def record(self, func: Any, args: Any, inputs: list[Tensor], outputs: Any) -> None:
        """Record an operation that sends or receives: one that has a process group, or its name."""
        if func.namespace == "c10d":
            groups = [each for each in args if isinstance(each, torch.ScriptObject)]
            group = dist.ProcessGroup.unbox(groups[0])
        elif func.namespace in ("_c10d_functional", "_dtensor") and isinstance(args[-1], str):
            group = c10d._resolve_process_group(args[-1])
        else:
            return
        members = dist.get_process_group_ranks(group)
        operation = func.name().partition("::")[2].strip("_")
        # Lists hold alike tensors, and some ranks may have none.
        words = [operation, *dict.fromkeys(f"{each.dtype}{[*each.shape]}" for each in inputs)]
        if operation in ("send", "recv"):
            pair = [dist.get_rank(), members[args[2]]]
            members = pair if operation == "send" else pair[::-1]
        else:
            words += [str(each) for each in args if type(each) is int][:1]  # Such as the root.
        # The largest argument or output has what all members have after it.
        num_bytes = max(count_bytes(each) for each in (*args, outputs))
        lines = [f"{frame.f_globals.get('__name__')}.py:{line}" for frame, line in walk_stack(None)]
        line = next(line for line in lines if line.startswith(f"{PACKAGE}.")).partition(".")[2]
        dimension = group.group_desc.removeprefix("mesh_").replace("default_pg", "world")
        call = (dist.get_rank(), " ".join(words), dimension, group.group_name, tuple(members))
        self.messages.append(Message(*call, num_bytes, line))


def count_bytes(tree: Any) -> int:
    """Return the bytes of tensors, or of this rank's shards of them."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in tensors)


def rehearse_rank(config: Any, world_size: int, rank: int) -> tuple[Any, ...]:
    """Do what a run does as one of its ranks; messages of the backend "fake" go nowhere."""
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    process = distributed.Process(dist.HashStore(), rank, world_size, cpu_group=dist.new_group())
    # The other ranks have what this one has; but if it trains no parameter, another one does.
    process.on_main = lambda action: action()
    process.all_gather = lambda own: [own is False or own] * world_size
    datasets = dataset.build_datasets(config)
    with (
        TemporaryDirectory() as config.run.dir,
        patch("builtins.print"),
        patch.object(experiment, "build_datasets", lambda _: datasets),
        # Tensors without values have attributes, and no storage that could be copied.
        patch.multiple(sharded, refuse_hooks=lambda _: None, DefaultStager=DEFAULT),
        patch.object(parallel.Parallel, "load_full_state_dict", lambda *_: None),
        patch.object(Tensor, "isfinite", return_value=torch.tensor(True)),
        patch.object(dist, "new_group", lambda ranks=None, *_, **__: c10d.new_group(ranks)),
        patch.multiple(dist, send_object_list=DEFAULT, recv_object_list=DEFAULT),
        patch.multiple(sharded.Checkpointer, write=DEFAULT, write_shards=DEFAULT),
        Recorder() as recorder,
    ):
        return run(train.Trainer(config, process), datasets, recorder)


def run(trainer: Any, datasets: Any, recorder: Recorder) -> tuple[Any, ...]:
    """Take two steps, save, evaluate; returns all messages, and a step's, its sizes, its FLOPs."""
    for group in trainer.optimizer.param_groups:
        group["foreach"] = False  # An accelerator's fused kernel has no temporary tensors.
    microbatch = build_batch(datasets[0], trainer.config.data.micro_batch_size)
    batch = [microbatch] * len(trainer.parallel.microbatches)
    trainer.start_period()
    for _ in range(2):  # In the first, DTensor runs each operation on whole tensors, too.
        start = len(recorder.messages)
        recorder.peak = recorder.flops = 0
        trainer.unlogged_steps.append(trainer.train_step(batch))
        trainer.step += 1
    parameters = list(trainer.parallel.module.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    sizes = [count_bytes(tensors) for tensors in (parameters, trained, trainer.optimizer.state)]
    sizes += [recorder.peak - sum(sizes), recorder.peak]
    measured = (recorder.messages[start:], sizes, recorder.flops)
    trainer.save()
    evaluator = trainer.evaluator
    evaluator.batches = evaluator.batches[:1]
    evaluator.loader = [build_batch(datasets[1], len(evaluator.batches[0]))]
    evaluator.to_numpy = dict  # Metrics of batches have no values.
    trainer.parallel.module.eval()
    evaluator.measure()
    return recorder.messages, *measured


def build_batch(samples: Any, size: int) -> Any:
    """Return a batch without values, whose samples are like the first."""
    batch = dataset.collate_fn([samples[0]] * size)
    return tree_map_only(Tensor, lambda each: torch.empty(each.shape, dtype=each.dtype), batch)


def replay(sequences: dict[int, list[Message]]) -> list[Message]:
    """Pass on messages of the ranks that ran until none moves; return what differs or is left."""
    sent = defaultdict[Any, list[Message]](list)
    is_moving = True
    while is_moving:
        is_moving = False
        for sequence in filter(None, sequences.values()):
            message = sequence[0]
            place = message[3:5]
            queues = [sequences[member] for member in message.members if member in sequences]
            if message.call.startswith("send "):  # It waits for nobody.
                if message.members[1] in sequences:
                    sent[place].append(message)
                queues = [sequence]
            elif message.call.startswith("recv ") and message.members[0] in sequences:
                queues = [sequence, sent[place]]
            heads = [queue[0] for queue in queues if queue and queue[0][3:5] == place]
            if len(heads) < len(queues):
                continue
            if len({head.call.replace("send ", "recv ") for head in heads}) > 1:
                return heads
            for queue in queues:
                queue.pop(0)
            is_moving = True
    stuck = [sequence[0] for sequence in sequences.values() if sequence]
    return stuck or [queue[0] for queue in sent.values() if queue]


def rehearse(config: Any, options: Any) -> None:
    """Print what ranks hold and send in a step, and whether the messages of all ranks match."""
    config.train.compile = False  # Compiled blocks need about as much memory.
    start = time.perf_counter()
    dp_size = config.parallel.dp_size(options.ranks)
    stages = getattr(config.parallel, "pipeline", 1) or options.ranks // dp_size
    # Along the second dimension, ranks have the same part of the model, and other data.
    grid = torch.arange(options.ranks).view(stages, dp_size, -1)
    columns = [*range(dp_size)] if options.all else sorted({0, min(1, dp_size - 1), dp_size - 1})
    ranks = grid[:, columns].flatten().tolist()
    # DTensor caches process groups, so each rank has a process of its own.
    context: Any = get_context("forkserver" if sys.platform == "linux" else "spawn")
    context.set_forkserver_preload([f"{PACKAGE}.train"])
    with ProcessPoolExecutor(mp_context=context, max_tasks_per_child=1) as pool:
        results = pool.map(partial(rehearse_rank, config, options.ranks), ranks)
        messages, steps, sizes, flops = zip(*results, strict=True)
    print_step(dict(zip(ranks, sizes, strict=True)), steps, max(flops), options)
    print(f"{len(ranks)} of {options.ranks} ranks ran, in {time.perf_counter() - start:.0f} s")
    stuck = defaultdict[str, list[int]](list)
    for message in replay(dict(zip(ranks, messages, strict=True))):
        stuck[f"{message.call} over {message.dimension} at {message.line}"].append(message.rank)
    if stuck:  # A few ranks have probably a branch of their own, and so come first.
        calls = sorted(stuck, key=lambda call: len(stuck[call]))[:4]
        places = "; ".join(f"rank(s) {stuck[call][:4]} in {call}" for call in calls)
        sys.exit(f"error: messages do not match: {places}")
    print("messages match, as far as they do not depend on values")


def print_step(sizes: dict[int, list[int]], steps: Any, flops: int, options: Any) -> None:
    """Print the memory of ranks by kind, and what the one that sends most sends in a step."""
    print(f"{'GiB':14}weights  gradients  optimizer activations      peak")
    for rank, bytes_by_kind in sizes.items():
        print(f"rank {rank:<5}", *(f"{size / 2**30:10.4g}" for size in bytes_by_kind))
    peak = max(bytes_by_kind[-1] for bytes_by_kind in sizes.values()) / 2**30
    fits = "fit" if peak <= options.memory else "do not fit"
    verdict = f" {fits} into {options.memory:g}" if options.memory else ""
    print(f"{peak:.4g} GiB{verdict}; not counted: CUDA, NCCL, fragmentation")
    step = max(steps, key=lambda step: sum(message.num_bytes for message in step))
    bounds = [flops / 1e12 / (options.flops or math.inf)]
    for dimension in sorted({message.dimension for message in step}):
        sent = [message.num_bytes for message in step if message.dimension == dimension]
        print(f"a step: {len(sent)} messages, {sum(sent) / 2**30:.4g} GiB over {dimension}")
        bounds.append(sum(sent) / 1e9 / options.links.get(dimension, math.inf))
    if max(bounds):
        print(f"a step takes at least {max(bounds):.4g} s at these rates")
