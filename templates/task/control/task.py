"""What is learned and measured: the losses, what they are a mean over, and the metrics."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .config import Config
from .dataset import Policy, collect, minibatches, play
from .distributed import Process

VALUE_WEIGHT = 0.5  # Of the critic's squared error in the loss.


class Task:
    """The losses and metrics of an experiment; each rank builds one."""

    best_metric, higher_is_better = "mean_return", True  # They select the best checkpoint.

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self.device = config, device

    def policy(self, predict: Callable[[Any], Any]) -> Policy:
        """Return the model as a function on the CPU, where the environments are."""
        return lambda observations: predict(observations.to(self.device)).float().cpu()

    def learn(self, predict: Callable[[Any], Any], numbers: Tensor, step: int, process: Process) -> Iterator[Any]:
        """Let the policy act in environments, and yield local batches to train it with; a collective."""
        experience = collect(self.policy(predict), numbers.tolist(), step, self.config)
        experience["advantage"] = normalize(experience["advantage"], process)
        yield from minibatches({name: part.to(self.device) for name, part in experience.items()}, step, self.config)

    def play(self, predict: Callable[[Any], Any], numbers: Tensor) -> dict[str, Tensor]:
        """Play episodes of an evaluation; returns the metrics of each."""
        return play(self.policy(predict), numbers.tolist(), self.config)

    def losses(self, outputs: Any, targets: Any) -> dict[str, Tensor]:
        """Return sums over the steps of a micro-batch, by name; ``loss`` is minimized, and all are logged.

        They are those of Schulman et al. 2017 (arXiv:1707.06347, equations 7 and 9). ``kl`` estimates how far the
        policy is from the one that acted (Schulman 2020, k3), and ``clip_fraction`` counts clipped ratios.

        Args:
            outputs: Logits and values, of shape (environments, steps, actions + 1).
            targets: ``action``, ``log_prob``, ``advantage`` and ``return``, of shape (environments, steps).
        """
        settings, outputs, advantage = self.config.dataset, outputs.float(), targets["advantage"]
        log_probs = outputs[..., :-1].log_softmax(dim=-1)
        log_ratio = log_probs.gather(-1, targets["action"][..., None])[..., 0] - targets["log_prob"]
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
        policy_loss = -torch.minimum(ratio * advantage, clipped * advantage).sum()
        value_loss = (outputs[..., -1] - targets["return"]).square().sum()
        entropy = -(log_probs.exp() * log_probs).sum()
        return {
            "loss": policy_loss + VALUE_WEIGHT * value_loss - settings.entropy_weight * entropy,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "kl": (log_ratio.expm1() - log_ratio).sum(),
            "clip_fraction": (clipped != ratio).sum().float(),
        }

    def weight(self, targets: Any) -> int | Tensor:
        """Return what the losses of a local batch are divided by for their mean: its number of steps."""
        return targets["action"].numel()

    def aggregate(self, metrics: dict[str, np.ndarray]) -> dict[str, Any]:
        """Return the metrics of all episodes: a return is the sum of an episode's rewards, without discount."""
        returns, lengths = metrics["return"].astype(np.float64), metrics["length"].astype(np.float64)
        extremes = {"min_return": returns.min(), "max_return": returns.max()}
        return {"mean_return": returns.mean(), **extremes, "mean_length": lengths.mean()}

    def throughput(self, samples_per_second: float) -> dict[str, float]:
        """Return what a record of training also has to say about its speed."""
        return {"environment_steps_per_second": samples_per_second * self.config.dataset.steps}


def normalize(values: Tensor, process: Process) -> Tensor:
    """Return values with a mean of 0 and a standard deviation of 1 over all ranks; a collective."""
    values = values.double()
    sums = process.all_gather((values.numel(), values.sum().item(), values.square().sum().item()))
    count, total, squares = (sum(column) for column in zip(*sums, strict=True))
    mean = total / count
    deviation = math.sqrt(max(0.0, squares / count - mean**2))
    return ((values - mean) / (deviation + 1e-8)).float()
