"""``benchmark``: measures how long the parts of a training step take and how much memory it needs; writes no files."""

import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..runtime import Process, all_gather_object, on_main
#:: if cookiecutter.__has_stages ::#
from .bubble import expected_bubble, measured_bubble, watch_stages
#:: endif ::#
from .pace import memory_in_use, reset_peak_memory

WARM_UP, STEPS = 5, 20


class Stopwatch:
    """Sums the seconds spent in selected methods by name, including their work on the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Add the time spent in ``owner.method`` to ``name``."""
        function = getattr(owner, method)

        def watched(*args: Any, **kwargs: Any) -> Any:
            start = self.now()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += self.now() - start

        setattr(owner, method, watched)

    def now(self) -> float:
        """Return the time in seconds, once the device has finished its work."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()


def benchmark(build_trainer: Callable[[], Any], process: Process, steps: int | None) -> None:
    """Train ``steps`` steps (20 if None) after a warm-up, and print the measurements as one line of JSON.

    Throughput is measured first, without timing the parts of a step, because that has to wait for the device.
    """
    steps = steps or STEPS
    before = memory_in_use(process.device)
    trainer, stopwatch = build_trainer(), Stopwatch(process.device)
    batches = endless_batches(trainer)
    reset_peak_memory(process.device)
    run(trainer, batches, WARM_UP)
    #:: if cookiecutter.__plays ::#
    environment_steps = -trainer.sampler.environment_steps
    #:: endif ::#
    start = stopwatch.now()
    run(trainer, batches, steps)
    seconds = stopwatch.now() - start
    #:: if cookiecutter.__plays ::#
    environment_steps += trainer.sampler.environment_steps
    #:: endif ::#

    stopwatch.watch(trainer.parallel, "forward_backward", "forward_backward")
    stopwatch.watch(trainer.parallel, "clip_grad_norm", "clip_grad_norm")
    stopwatch.watch(trainer.scaler, "step", "optimizer")
    #:: if cookiecutter.__plays ::#
    stopwatch.watch(trainer.sampler, "collect", "collecting")
    stopwatch.watch(trainer.sampler.environments, "step", "stepping")
    #:: endif ::#
    #:: if cookiecutter.__has_stages ::#
    watch_stages(trainer.parallel, stopwatch)
    #:: endif ::#
    start = stopwatch.now()
    run(trainer, batches, steps)
    stopwatch.seconds["whole_step"] = stopwatch.now() - start

    parts = {name: round(1000 * total / steps, 3) for name, total in stopwatch.seconds.items()}
    mebibytes = round((memory_in_use(process.device, peak=True) - before) / 2**20, 1)
    ranks: list[Any] = all_gather_object({"ms_per_step": parts, "peak_memory_mib": mebibytes})
    record = {
        "event": "benchmark",
        "world_size": process.world_size,
        "device": process.device.type,
        **trainer.pace.throughput(steps, seconds),
        #:: if cookiecutter.__has_stages ::#
        "bubble_expected": round(expected_bubble(trainer.parallel), 4),
        "bubble_measured": round(measured_bubble([rank["ms_per_step"] for rank in ranks]), 4),
        #:: endif ::#
        #:: if cookiecutter.__plays ::#
        "environment_steps_per_second": round(environment_steps / seconds, 1),
        "collecting_share": round(stopwatch.seconds["collecting"] / stopwatch.seconds["whole_step"], 4),
        "stepping_share": round(stopwatch.seconds["stepping"] / stopwatch.seconds["whole_step"], 4),
        #:: endif ::#
        "ranks": ranks,
    }
    on_main(lambda: print(json.dumps(record)))


def endless_batches(trainer: Any) -> Iterator[Any]:
    """Yield this rank's share of one global batch after another, epoch after epoch."""
    for epoch in itertools.count():
        trainer.sampler.set_epoch(epoch)
        yield from trainer.loader


def run(trainer: Any, batches: Iterator[Any], steps: int) -> None:
    """Take ``steps`` optimizer steps."""
    for inputs, targets in itertools.islice(batches, steps):
        trainer.step(inputs, targets)
