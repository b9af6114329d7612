"""Losses and gradients that are not finite (inf or NaN): they never reach the weights, and the run says where from.

    step 41   the norm of the gradient is NaN: the fused optimizer leaves the step out, on the device; no rank waits
    step 50   a log line, which waits for the device anyway: the run ends with the weights of step 40 (stop), or goes
              on, and the record counts the steps that were left out (skip)

The norm is that of the whole model's gradient, so all ranks decide alike.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import Sampler

from ..config import UserError
from ..runtime import all_gather_numbers, all_gather_object
from ..splitting import name_some, to_device, unpack

MOST_SKIPPED = 100  # Steps in a row; a run that goes on skipping learns nothing.


class FiniteGuard:
    """Leaves out the optimizer steps whose gradient is not finite; with ``stop``, also all that follow.

    Args:
        module: This rank's part of the model. If the run goes on, its floating-point buffers, such as BatchNorm's
            statistics, are not changed by such steps either.
        policy: ``stop`` if the run is to end, ``skip`` if it goes on without the step.
        scaler: If it is enabled, it leaves out steps itself, whenever its factor was too large; then, only losses say
            that something is wrong.
    """

    def __init__(self, module: nn.Module, policy: str, scaler: torch.amp.GradScaler) -> None:
        self.stops, self.is_scaled = policy == "stop", scaler.is_enabled()
        self.buffers = [] if self.stops else [buffer for buffer in module.buffers() if buffer.is_floating_point()]
        self.kept = [buffer.clone() for buffer in self.buffers]
        self.skipped_in_a_row = 0
        # The place in the data of each step since the last look: the epoch, and the samples of it consumed before.
        self.places: list[tuple[int, int]] = []
        # Of these steps: the number, counted from 1, this rank's loss and the norm.
        self.steps: list[tuple[int, Tensor, Tensor]] = []
        self.left_out = torch.tensor(False)  # Whether the last one was.

    def begin(self, epoch: int, samples: int) -> None:
        """Note the place of the next step in the data."""
        self.places.append((epoch, samples))

    def protect(self, loss: Tensor, norm: Tensor, *optimizers: torch.optim.Optimizer) -> None:
        """Make the next step of ``optimizers`` do nothing if the gradient is not finite; this waits for no device.

        Args:
            loss: This rank's part of the loss.
            norm: The norm of the whole model's gradient.
            optimizers: A fused one checks on the device; for another, the process has to wait for it.
        """
        norm = norm.detach()  # On the CPU if the gradient is offloaded.
        left_out = ~norm.isfinite()
        if self.stops and self.steps:
            left_out |= self.left_out
        self.left_out = left_out
        self.steps.append((max(1, len(self.places)), loss.detach(), norm))
        for buffer, kept in zip(self.buffers, self.kept, strict=True):
            kept.copy_(torch.where(left_out.to(kept.device), kept, buffer))
            buffer.copy_(kept)
        for optimizer in optimizers if not self.is_scaled else ():
            if getattr(optimizer, "_step_supports_amp_scaling", False):
                optimizer.found_inf = left_out.float()  # type: ignore[attr-defined]
            elif left_out:
                optimizer.zero_grad()

    def judge(self, counted: list[list[float]]) -> tuple[int, str, list[int], int]:
        """Return what was not finite since the last call, as (step, loss or gradient, ranks, number of steps).

        Steps count from the last call; 0: everything was finite. ``counted`` is what each rank has counted.
        """
        everyone = [list(map(int, seen)) for seen in counted]
        self.steps.clear()
        if self.is_scaled:
            everyone = [[loss, 0, count] for loss, _, count in everyone]
        step = min((step for seen in everyone for step in seen[:2] if step), default=0)
        what = "loss" if any(loss == step for loss, *_ in everyone) else "gradient"
        ranks = [rank for rank, seen in enumerate(everyone) if seen[what == "gradient"] == step]
        return step, what, ranks, max(count for *_, count in everyone)

    def count(self) -> list[float]:
        """Return the first step with such a loss, the first with such a gradient (0: none), and the number of these.

        Waits for the device.
        """
        if not self.steps:
            return [0, 0, 0]
        numbers, *columns = zip(*self.steps, strict=True)
        losses, norms = (torch.tensor(numbers)[~torch.stack(values).isfinite().cpu()].tolist() for values in columns)
        return [min(losses, default=0), min(norms, default=0), len(norms)]


def check_finite(trainer: Any, counted: list[list[float]] | None = None) -> dict[str, int]:
    """Reject a loss or a gradient that was not finite since the last call, or print which steps were left out.

    Returns what records say of the steps that were, if there are any. A collective, which waits for the device, unless
    it is given what the guard of each rank has ``counted``.
    """
    guard, progress = trainer.guard, trainer.progress
    if counted is None:
        (counted,) = all_gather_numbers(guard.count(), device=trainer.process.device)
    nth, what, ranks, count = guard.judge(counted)
    places, guard.places = guard.places, []
    step = progress.step - len(places) + nth
    found = f"step {step}: the {what} is not finite on rank {', '.join(map(str, ranks))}"
    if nth and guard.stops:
        located = all_gather_object(locate(trainer, *places[nth - 1]))
        shown = next((f", first in {place}" for place in located if place), "")
        raise UserError(
            f"{found}{shown}. The run ends with its last checkpoint; fix the samples or the model, lower optim.lr, or "
            "set train.on_nonfinite to skip such steps"
        )
    skipped = count if nth else 0
    # Without steps since the last look, as when a save follows a log line, the row goes on.
    guard.skipped_in_a_row = guard.skipped_in_a_row + skipped if skipped == len(places) else 0
    if guard.skipped_in_a_row >= MOST_SKIPPED:
        raise UserError(
            f"{found}, as in the {guard.skipped_in_a_row} steps before, which were all skipped. The run ends with its "
            "last checkpoint; fix the samples or the model, or lower optim.lr"
        )
    if nth:
        progress.skipped_steps += skipped
        trainer.tracker.print(f"{found}; skipped {skipped} step(s) up to step {progress.step}")
    return {"skipped_steps": progress.skipped_steps} if progress.skipped_steps else {}


def locate(trainer: Any, epoch: int, samples: int) -> str:
    """Run the forward of a step again, and return what was the first not to be finite in it; empty if all was.

    The weights are still those before the step. Its samples may be gone, such as experience that has been replaced. A
    collective, if the forward is one.
    """
    trainer.sampler.set_epoch(epoch, start=samples)
    batch = next(iter(trainer.loader), None)
    if batch is None:
        return ""
    inputs = to_device(unpack(batch)[0], trainer.process.device)
    with torch.no_grad(), nonfinite_module(trainer.parallel.module) as found:
        trainer.parallel.predict(inputs)
    if rows := nonfinite_rows(inputs):
        return f"the inputs of samples {name_samples(trainer, rows)}"
    return f"the output of {found[0]}" if found else ""


def nonfinite_rows(inputs: Any) -> list[int]:
    """Return the numbers of the samples in a batch that are not finite."""
    parts = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return sorted({row for part in parts for row in (~part.flatten(1).isfinite()).any(1).nonzero().flatten().tolist()})


def name_samples(trainer: Any, rows: list[int]) -> str:
    """Return the indices of samples in the training set; their places in the batch if the set is a stream."""
    sampler, names = trainer.sampler, rows
    if isinstance(sampler, Sampler):
        keys = list(islice(sampler, rows[-1] + 1))
        names = [keys[row][1] for row in rows]
    return name_some(names)


@contextmanager
def nonfinite_module(model: nn.Module) -> Iterator[list[str]]:
    """Yield a list that gets the names of modules whose output is not finite, in the order in which they compute it."""
    found: list[str] = []

    def observe(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
            parts = [part for part in tree_leaves(outputs) if isinstance(part, Tensor) and part.is_floating_point()]
            if not all(part.isfinite().all() for part in parts):
                found.append(name)

        return hook

    hooks = [module.register_forward_hook(observe(name)) for name, module in model.named_modules() if name]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
