"""Train a project as the ranks of a group, one after the other, on devices that devices.py makes.

run_ranks.py PROJECT WORLD_SIZE OUTPUT [settings]: what each rank did is written to OUTPUT, a pickle.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import devices
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.device_mesh
import torch.testing._internal.distributed.fake_pg
from messages import Message
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves


def install(distributed: Any, evaluate: Any, losses: Any, rank: int, world_size: int, sent: list[Any]) -> None:
    """Let a rank be alone: messages are recorded and not sent, and objects are those that rank 0 has ``sent``.

    Rank 0 runs first. Other ranks are assumed to have what this rank has.
    """
    dist.Backend.default_device_backend_map["cuda"] = "fake"
    new_group, init_process_group = dist.new_group, dist.init_process_group

    def init_fake_group(backend: str, **options: Any) -> None:
        assert backend == "fake", f"the backend of an accelerator is {backend}"
        init_process_group(backend, **options)

    def record(operation: str, group: Any = None, peer: int | None = None) -> None:
        group = group or dist.group.WORLD
        ranks = tuple(dist.get_process_group_ranks(group))
        devices.messages.append(Message(operation, group.group_name, ranks, (), peer, devices.line_of_project()))

    def new_fake_group(*words: Any, backend: Any = None, **options: Any) -> Any:
        record("new_group")
        return new_group(*words, **options)

    received = iter(sent[:])

    def exchange(value: Any) -> Any:
        """Return the next object of rank 0: all ranks receive them in the same order."""
        if rank == 0:
            sent.append(value)
            return value
        return next(received)

    def all_gather(process: Any, value: Any) -> list[Any]:
        record("all_gather_object", process.cpu_group)
        return [exchange(value), *[value] * (world_size - 1)]

    def broadcast(objects: list[Any], source: int, group: Any) -> None:
        record("broadcast_object", group)
        objects[:] = exchange(objects[:])

    def send(_: Any, target: int, group: Any) -> None:
        record("send_object", group, target)

    def receive(objects: list[Any], source: int, group: Any) -> None:
        """Let rank 0 save its own stage alone."""
        record("recv_object", group, source)
        objects[0] = {"model": {}, "optimizer": {"state": {}}}

    average = losses.MeanLosses.average

    def average_of_any_stage(means: Any, steps: list[Any]) -> list[dict[str, float]]:
        """Return 1 for losses that a later stage has, which did not run yet."""
        if any(steps):
            return average(means, steps)
        all_gather(means.parallel.process, [[] for _ in steps])
        return [{"loss": 1.0, "grad_norm": 1.0} for _ in steps]

    losses.MeanLosses.average = average_of_any_stage
    # The shards of a sharded checkpoint are copied to the host, and not written.
    torch.distributed.checkpoint.save = lambda _, storage_writer, **__: os.makedirs(storage_writer.path)
    tracker: Any = torch.distributed.tensor._random.OffsetBasedRNGTracker
    init_tracker = tracker.__init__

    def init_fake_tracker(self: Any, mesh: Any, run_state_sync: bool = True) -> None:
        record("broadcast_random_state")
        init_tracker(self, mesh, run_state_sync=False)

    # The state of a device's generator has no values, either.
    tracker.__init__ = init_fake_tracker
    tracker._distribute_region = lambda *_, **__: nullcontext()
    dist.init_process_group = init_fake_group
    for module in (dist, dist.distributed_c10d, torch.distributed.device_mesh):  # Each has the name for itself.
        module.new_group = new_fake_group
    dist.broadcast_object_list = broadcast
    dist.send_object_list = send
    dist.recv_object_list = receive
    distributed.Process.all_gather = all_gather
    distributed.Process.on_main = lambda _, action: action()
    # Rank 0's clock says when ranks look for stop signals. Here, they do so at records alone.
    distributed.CHECK_SECONDS = 1e9
    # A metric is computed from values.
    evaluate.Evaluator.aggregate = lambda evaluator, _: {evaluator.task.best_metric: 1.0}


def bytes_on_devices() -> int:
    """Return the memory of all tensors on devices."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) is FakeTensor and each.device.type == "cuda"]
    return sum({id(each.untyped_storage()): each.untyped_storage().nbytes() for each in tensors}.values())


def devices_of(tree: Any) -> set[str]:
    """Return the devices of a tree's tensors."""
    return {str(leaf.device) for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}


def train(package: str, rank: int, world_size: int, sent: list[Any], words: list[str]) -> dict[str, Any]:
    """Train as one rank; returns its messages, its waits in each step, and where its tensors are."""
    names = ("__main__", "distributed", "evaluate", "losses", "train")
    main, distributed, evaluate, losses, train = (importlib.import_module(f"{package}.{name}") for name in names)
    install(distributed, evaluate, losses, rank, world_size, sent)
    _, config, _ = main.parse(["train", *words])
    config.check(world_size, trains=True)
    process = distributed.Process(dist.HashStore(), rank, world_size)
    distributed.setup(config, process)
    waits: dict[str, list[Any]] = {"step": [], "log": []}
    places, kept = {"batches": set[str]()}, []
    with devices.Devices(), torch.autograd.set_multithreading_enabled(False):
        trainer = train.Trainer(config, process)
        evaluation, set_weight = trainer.evaluate, trainer.losses.set_weight

        def count_waits(name: str, method: Any) -> Any:
            def counted(*words: Any) -> Any:
                before = len(devices.waits)
                result = method(*words)
                waits[name].append(devices.waits[before:])
                return result

            return counted

        def measured_evaluation() -> None:
            before = bytes_on_devices()
            evaluation()
            kept.append(bytes_on_devices() - before)

        def seen_batch(microbatches: list[Any]) -> None:
            places["batches"] |= devices_of(microbatches)
            set_weight(microbatches)

        trainer.train_step, trainer.log = count_waits("step", trainer.train_step), count_waits("log", trainer.log)
        trainer.evaluate, trainer.losses.set_weight = measured_evaluation, seen_batch
        trainer.run()
        places["parameters"] = devices_of([*trainer.parallel.module.parameters()])
        moments = list(trainer.optimizer.state.values())
        places["moments"] = devices_of([{**state, "step": None} for state in moments])
    return {"sent": sent, "messages": devices.messages, "waits": waits, "places": places, "kept": kept}


def main(project: str, world_size: str, output: str, *words: str) -> None:
    sys.path.insert(0, f"{project}/src")
    (package,) = os.listdir(f"{project}/src")
    devices.install()
    results: dict[int, Any] = {}
    for rank in range(int(world_size)):
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": world_size, "LOCAL_RANK": str(rank % 8)}
        run_dir = f"{output}-run{rank}"
        if not (child := os.fork()):
            try:
                sent = results[0]["sent"] if rank else []
                result = train(package, rank, int(world_size), sent, [*words, "--run.dir", run_dir])
            except Exception as error:
                result = {"error": "".join(traceback.format_exception(error))}
            Path(f"{output}-{rank}").write_bytes(pickle.dumps(result))
            os._exit(0)
        os.waitpid(child, 0)
        results[rank] = pickle.loads(Path(f"{output}-{rank}").read_bytes())
        if "error" in results[rank]:
            break
    Path(output).write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
