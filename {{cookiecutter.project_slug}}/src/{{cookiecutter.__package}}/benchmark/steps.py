"""The parts of a step, which follow one another and sum up to the whole:

data                  waiting for the loader, and copying the batch to the device
forward, backward     of all micro-batches; what is recomputed for backward belongs to it
optimizer             the gradient's norm, the update of the weights, the schedule
logging               what the records of metrics take, of which there is one in ``train.log_every`` steps
"""

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch.profiler import record_function

from ..splitting import to_device, unpack


class Stopwatch:
    """Sums the seconds spent in selected methods by name, including their work on the device.

    The methods get back to what they were at the end of a ``with`` block. In a trace, their names stand above the work.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.running: set[str] = set()
        self.stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Add the time spent in ``owner.method`` to ``name``, once if it calls itself."""
        function = getattr(owner, method)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if name in self.running:
                return function(*args, **kwargs)
            self.running.add(name)
            start = self.now()
            try:
                with record_function(name):
                    result = function(*args, **kwargs)
                    self.synchronize()
                return result
            finally:
                self.running.remove(name)
                self.seconds[name] += self.now() - start

        setattr(owner, method, watched)
        self.stack.callback(setattr, owner, method, function)

    def time(self, action: Callable[[], object]) -> float:
        """Return how many seconds an action takes."""
        start = self.now()
        action()
        return self.now() - start

    def now(self) -> float:
        """Return the time in seconds, once the device has finished its work."""
        self.synchronize()
        return time.perf_counter()

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


class Steps:
    """Takes optimizer steps as the training loop does, without evaluating and saving."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.batches = trainer, endless_batches(trainer)
        self.inputs: Any = None  # The last ones of this rank.

    def take(self, count: int, log_every: int | None = None) -> None:
        """Take ``count`` steps; ``log_every`` is the run's if None. A collective."""
        trainer = self.trainer
        for number in range(1, count + 1):
            self.inputs, targets = self.load()
            lr = float(trainer.scheduler.get_last_lr()[0])
            losses, norm = trainer.step(self.inputs, targets)
            trainer.progress.step += 1
            if number % (log_every or trainer.config.train.log_every) == 0:
                trainer.log(losses, norm, lr)

    def load(self) -> Any:
        """Return this rank's share of the next global batch, on the device."""
        return to_device(unpack(next(self.batches)), self.trainer.process.device)


def endless_batches(trainer: Any) -> Iterator[Any]:
    """Yield this rank's share of one global batch after another, epoch after epoch."""
    for epoch in itertools.count():
        trainer.sampler.set_epoch(epoch)
        yield from trainer.loader


def watch_parts(stopwatch: Stopwatch, steps: Steps, trainer: Any) -> None:
    """Measure the methods whose times ``split_step`` needs, and some more that explain them."""
    stopwatch.watch(steps, "load", "data")
    stopwatch.watch(trainer, "step", "step")
    stopwatch.watch(trainer, "log", "logging")
    stopwatch.watch(trainer.parallel, "forward_backward", "forward_backward")
    stopwatch.watch(torch.autograd, "backward", "backward")  # Tensor.backward and every strategy call one of these.
    stopwatch.watch(torch.autograd, "grad", "backward")
    stopwatch.watch(trainer.parallel, "clip_grad_norm", "clip_grad_norm")
    stopwatch.watch(trainer.scaler, "step", "optimizer")
    #:: if cookiecutter.__plays ::#
    stopwatch.watch(trainer.sampler, "collect", "collecting")
    stopwatch.watch(trainer.sampler.environments, "step", "stepping")
    #:: endif ::#


def split_step(times: Mapping[str, float]) -> dict[str, float]:
    """Return the time of each part of a step, from the times of the methods that ``watch_parts`` selects."""
    get = times.get
    return {
        "data": get("data", 0.0),
        "forward": get("forward_backward", 0.0) - get("backward", 0.0),
        "backward": get("backward", 0.0),
        "optimizer": get("step", 0.0) - get("forward_backward", 0.0),
        "logging": get("logging", 0.0),
    }


def take_out(exposed: Mapping[str, float], times: Mapping[str, float]) -> dict[str, float]:
    """Return the time of each part without the share of it that is ``exposed``, and the sum of what was taken out."""
    parts = split_step(times)
    taken = {name: time * exposed[name] for name, time in parts.items()}
    return {name: time - taken[name] for name, time in parts.items()} | {"exposed_communication": sum(taken.values())}
