"""The data, its loss and its metrics: proximal policy optimization in an environment.

``splitting/experience.py`` collects what the policy is trained on, and ``evaluate.py`` plays episodes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from .config import Config, ControlConfig, DataConfig, ModelConfig
from .launch import check_spaces
from .reporting import Examples, draw_episode
from .runtime import Context
from .splitting import Experience, Policy, read_outputs

# The metric that selects the best checkpoint, and whether higher is better.
BEST_METRIC, HIGHER_IS_BETTER = "mean_return", True

# Units of the curves of the loss, which has none, and that metric.
UNITS = {"mean_return": "sum of rewards"}

# Makes a batch of a list of samples; experience has its own batches.
collate_fn = default_collate


@dataclass
class Rollouts:
    """The training set: what the policy does in the environments. It depends on the model, so it builds its loader."""

    control: ControlConfig
    model: ModelConfig

    def build_loader(
        self, strategy: Any, data: DataConfig, seed: int, register: Callable[..., None], guard: Context
    ) -> tuple[Experience, Experience]:
        """Make this rank's environments; returns the sampler and the loader of its share of each global batch."""
        policy, functions = Policy(strategy, self.model), (estimate_advantages, aggregate_metrics)
        experience = Experience(self.control, policy, data.global_batch_size, seed, guard, *functions)
        register("experience", experience)
        return experience, experience


@dataclass
class Episodes:
    """The test set: episodes, numbered over all ranks; each has a seed of its own and is played to its end once."""

    control: ControlConfig
    model: ModelConfig

    def __len__(self) -> int:
        return self.control.evaluation_episodes


def build_datasets(config: Config) -> tuple[Rollouts, Episodes]:
    """Return what to train on, and the episodes to evaluate on; reject a model for another environment."""
    check_spaces(config.control, config.model)
    return Rollouts(config.control, config.model), Episodes(config.control, config.model)


def estimate_advantages(
    rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, done: Tensor, config: ControlConfig
) -> Tensor:
    """Return how much better than expected each action was (Schulman et al. 2016, arXiv:1506.02438, equation 16).

    Args:
        rewards: Of shape (environments, steps), like all others.
        values: What the critic expects before each step.
        next_values: What it expects after each step.
        terminated: Whether nothing follows the step.
        done: Whether the step is the last of its episode.
        config: The discount factor, and lambda.
    """
    td_errors = rewards + config.discount * next_values * ~terminated - values
    advantages, advantage = torch.empty_like(td_errors), torch.zeros(len(td_errors))
    for step in reversed(range(td_errors.shape[1])):
        advantage = td_errors[:, step] + config.discount * config.gae_lambda * ~done[:, step] * advantage
        advantages[:, step] = advantage
    return advantages


def loss_fn(outputs: Tensor, targets: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    """Return the sums of the losses of proximal policy optimization over a batch, and what they are sums of.

    They are those of Schulman et al. 2017 (arXiv:1707.06347, equations 7 and 9). ``kl`` estimates the divergence of the
    policy from the one that collected the experience, without bias and never below 0 (Schulman 2020, k3);
    ``clip_fraction`` counts the samples whose ratio is out of bounds.

    Args:
        outputs: The model's outputs, of shape (batch, columns).
        targets: ``action``, ``log_prob``, ``advantage`` and ``return`` of each sample, and settings of the loss.
    """
    policy, values = read_outputs(outputs, is_discrete=not targets["action"].is_floating_point())
    log_ratio = policy.log_prob(targets["action"]) - targets["log_prob"]
    ratio, clip, advantage = log_ratio.exp(), targets["clip"], targets["advantage"]
    policy_loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).sum()
    value_loss, entropy = (values - targets["return"]).square().sum(), policy.entropy().sum()
    losses = {
        "loss": policy_loss + targets["value_weight"] * value_loss - targets["entropy_weight"] * entropy,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "kl": (torch.expm1(log_ratio) - log_ratio).sum(),  # Not ratio - 1, whose rounding errors may be larger.
        "clip_fraction": ((ratio - 1).abs() > clip).sum().float(),
    }
    return losses, len(outputs)


def aggregate_metrics(episodes: dict[str, np.ndarray]) -> dict[str, float]:
    """Aggregate the metrics of all episodes, which are arrays of shape (episodes,) by name.

    Returns:
        The mean, least and greatest return, which is the sum of an episode's rewards without discount, and the mean
        length, in steps.
    """
    returns = episodes["return"]
    metrics = {"mean_return": float(returns.mean()), "min_return": float(returns.min())}
    return metrics | {"max_return": float(returns.max()), "mean_length": float(episodes["length"].mean())}


def examples(evaluator: Any) -> Examples:
    """Return files that show the last evaluation, each with a function that makes it; optional, called on all ranks."""
    steps = evaluator.first_episode
    return {"episode.png": partial(draw_episode, steps)} if steps else {}
