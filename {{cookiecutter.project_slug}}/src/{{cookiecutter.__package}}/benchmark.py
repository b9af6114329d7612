"""Measures where the time of a training step goes, and how much memory it takes; leaves nothing behind."""

from __future__ import annotations

import itertools
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#:: if cookiecutter.parallelism == "pipeline" ::#
from .bubble import expected_bubble, measured_bubble, watch_stages
#:: endif ::#
from .config import Config
from .distributed import World, on_main
from .train import Trainer

WARM_UP = 5
STEPS = 20


class Stopwatch:
    """Adds up the seconds that are spent in some methods, by name, on the device too.

    Args:
        device: What is waited for before and after each call.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Count the time spent in ``owner.method`` under ``name``."""
        function = getattr(owner, method)

        def watched(*args: Any, **options: Any) -> Any:
            start = self.now()
            try:
                return function(*args, **options)
            finally:
                self.seconds[name] += self.now() - start

        setattr(owner, method, watched)

    def now(self) -> float:
        """The time in seconds, when the device has done all its work."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()


def benchmark(config: Config, world: World) -> None:
    """Train ``train.max_steps`` steps (20 where it is null) after some to warm up, and print the figures as JSON.

    Throughput is measured first, without a look at the parts: to time those, the device has to be waited for.
    """
    steps = config.train.max_steps or STEPS
    before = memory_in_use(world.device)
    trainer, stopwatch = Trainer(config, world), Stopwatch(world.device)
    batches = endless_batches(trainer)
    forget_peak_memory(world.device)
    run(trainer, batches, WARM_UP)
    start = stopwatch.now()
    run(trainer, batches, steps)
    seconds = stopwatch.now() - start

    stopwatch.watch(trainer.parallel, "forward_backward", "forward_backward")
    stopwatch.watch(trainer.parallel, "clip_grad_norm", "clip_grad_norm")
    stopwatch.watch(trainer.scaler, "step", "optimizer")
    #:: if cookiecutter.parallelism == "pipeline" ::#
    watch_stages(trainer.parallel, stopwatch)
    #:: endif ::#
    start = stopwatch.now()
    run(trainer, batches, steps)
    stopwatch.seconds["whole_step"] = stopwatch.now() - start

    parts = {name: round(1000 * total / steps, 3) for name, total in stopwatch.seconds.items()}
    mine = {"ms_per_step": parts, "peak_memory_mib": round((peak_memory(world.device) - before) / 2**20, 1)}
    ranks: list[Any] = [None] * world.size
    dist.all_gather_object(ranks, mine)
    figures = {
        "event": "benchmark",
        "world_size": world.size,
        "device": world.device.type,
        "samples_per_second": round(steps * config.data.global_batch_size / seconds, 1),
        #:: if cookiecutter.parallelism == "pipeline" ::#
        "bubble_expected": round(expected_bubble(trainer.parallel), 4),
        "bubble_measured": round(measured_bubble([rank["ms_per_step"] for rank in ranks]), 4),
        #:: endif ::#
        "ranks": ranks,
    }
    on_main(lambda: print(json.dumps(figures)), world)


def endless_batches(trainer: Trainer) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of one global batch after the other, epoch after epoch."""
    for epoch in itertools.count():
        trainer.sampler.set_epoch(epoch)
        yield from trainer.loader


def run(trainer: Trainer, batches: Iterator[tuple[Tensor, Tensor]], steps: int) -> None:
    """Do some optimizer steps."""
    for inputs, targets in itertools.islice(batches, steps):
        trainer.step(inputs, targets)


def memory_in_use(device: torch.device) -> int:
    """Bytes in use: of the device; on a CPU those of this process, as Linux counts them (0 elsewhere)."""
    return read_status("VmRSS") if device.type == "cpu" else torch.accelerator.memory_allocated()


def peak_memory(device: torch.device) -> int:
    """The most bytes in use since ``forget_peak_memory``."""
    return read_status("VmHWM") if device.type == "cpu" else torch.accelerator.max_memory_allocated()


def forget_peak_memory(device: torch.device) -> None:
    """From here on, count the peak anew: what was needed to build the model is left out."""
    clear = Path("/proc/self/clear_refs")
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()
    elif clear.exists():
        clear.write_text("5")  # proc(5): resets the peak of the resident set.


def read_status(name: str) -> int:
    """A size from the kernel's account of this process, in bytes."""
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)
