"""What is learned and measured: the losses, what they are a mean over, and the metrics."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .config import Config
from .dataset import Policy, collect, minibatches, play
from .distributed import Process, wide_dtype

VALUE_WEIGHT = 0.5  # The weight of the critic's squared error in the loss.


class Task:
    """The losses and metrics of the experiment; each rank builds one."""

    # The best checkpoint is chosen by this metric of the validation episodes.
    best_metric = "mean_return"
    higher_is_better = True

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config = config
        self.device = device

    def policy(self, predict: Callable[[Any], Any]) -> Policy:
        """Return the model as a function on the CPU, where the environments are."""
        return lambda observations: predict(observations.to(self.device)).to("cpu", wide_dtype())

    def learn(
        self,
        predict: Callable[[Any], Any],
        numbers: Tensor,
        step: int,
        process: Process,
    ) -> Iterator[Any]:
        """Let the policy act in environments, and yield lists of micro-batches; a collective.

        ``numbers`` are those of this rank's environments, and ``step`` steps came before.
        """
        experience = collect(self.policy(predict), numbers.tolist(), step, self.config)
        # All ranks normalize together, so that the scale does not depend on their number.
        experience["advantage"] = normalize(experience["advantage"], process)
        on_device = {name: values.to(self.device) for name, values in experience.items()}
        yield from minibatches(on_device, step, self.config)

    def play(self, predict: Callable[[Any], Any], numbers: Tensor) -> dict[str, Tensor]:
        """Play episodes of an evaluation, given by number; returns the metrics of each."""
        return play(self.policy(predict), numbers.tolist(), self.config)

    def losses(self, outputs: Any, targets: Any) -> dict[str, Tensor]:
        """Return sums over the steps of a micro-batch, by name; ``loss`` is minimized.

        ``outputs`` are logits and values of shape (environments, time, actions + 1); ``targets``
        have ``action``, ``log_prob``, ``advantage`` and ``return``, of shape (environments, time).
        """
        settings = self.config.dataset
        # Losses are computed in fp32 or fp64, even if the model computes in bf16 or fp16.
        outputs = outputs.to(wide_dtype())
        advantage = targets["advantage"]
        log_probs = outputs[..., :-1].log_softmax(dim=-1)
        log_prob = log_probs.gather(-1, targets["action"][..., None])[..., 0]
        log_ratio = log_prob - targets["log_prob"]
        ratio = log_ratio.exp()
        clipped_ratio = ratio.clamp(1 - settings.clip, 1 + settings.clip)
        # Equations 7 and 9 of Schulman et al. 2017 (arXiv:1707.06347) define these losses.
        # The minimum stops the gradient of an action whose probability has already changed by the
        # ratio `clip` in the direction of its advantage.
        surrogate = ratio * advantage
        clipped_surrogate = clipped_ratio * advantage
        policy_loss = -torch.minimum(surrogate, clipped_surrogate).sum()
        value_loss = (outputs[..., -1] - targets["return"]).square().sum()
        entropy = -(log_probs.exp() * log_probs).sum()
        weighted_entropy = settings.entropy_weight * entropy
        return {
            "loss": policy_loss + VALUE_WEIGHT * value_loss - weighted_entropy,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            # This estimates how far the policy is from the one that acted (Schulman 2020, k3).
            # expm1 is accurate where the policy has hardly changed: log_ratio is near 0 there.
            "kl": (log_ratio.expm1() - log_ratio).sum(),
            "clip_fraction": (clipped_ratio != ratio).sum().float(),
        }

    def weight(self, targets: Any) -> int | Tensor:
        """Return what the losses of a micro-batch are divided by: its number of steps."""
        return targets["action"].numel()

    def aggregate(self, metrics: dict[str, np.ndarray]) -> dict[str, Any]:
        """Return the metrics of all episodes."""
        # The return of an episode is the sum of its rewards, without discount.
        returns = metrics["return"].astype(np.float64)
        lengths = metrics["length"].astype(np.float64)
        return {
            "mean_return": returns.mean(),
            "min_return": returns.min(),
            "max_return": returns.max(),
            "mean_length": lengths.mean(),
        }

    def throughput(self, samples_per_second: float) -> dict[str, float]:
        """Return further numbers on speed for the log."""
        return {"environment_steps_per_second": samples_per_second * self.config.dataset.steps}


def normalize(values: Tensor, process: Process) -> Tensor:
    """Shift and scale values to mean 0 and standard deviation 1 over all ranks; a collective."""
    # float64 limits rounding errors: the variance below is the difference of two large numbers.
    wide_values = values.double()
    local_sums = (
        wide_values.numel(),
        wide_values.sum().item(),
        wide_values.square().sum().item(),
    )
    count = 0
    total = 0.0
    total_of_squares = 0.0
    # All ranks add in the same order, so that they get the same bits.
    for rank_count, rank_total, rank_total_of_squares in process.all_gather(local_sums):
        count += rank_count
        total += rank_total
        total_of_squares += rank_total_of_squares
    mean = total / count
    # Rounding may leave less than 0 of a variance of 0.
    variance = max(0.0, total_of_squares / count - mean**2)
    normalized = (wide_values - mean) / (math.sqrt(variance) + 1e-8)
    return normalized.to(values.dtype)
