"""What an experiment changes for its tests, printed in proof.md; it repeats optim.py's rules."""

import math
from typing import Any

import torch
from torch import Tensor

STEPS = 20
# The experiment is small: two epochs on the CPU, where all of optimizer and schedule has an effect.
SMALL = [
    *"--data.eval_batch_size 17 --distributed.device cpu --run.seed 7".split(),
    *f"--train.max_steps {STEPS} --train.log_every 1 --train.eval_every 10".split(),
    *"--checkpoint.every_steps 4 --optim.lr 1e-3 --optim.warmup_steps 5".split(),
    *"--optim.min_lr_ratio 0.1 --optim.weight_decay 0.1 --optim.eps 1e-6".split(),
    *("--optim.betas", "[0.8, 0.95]", "--train.clip_grad_norm", "0.1"),
    #:: filter indent(4, true) ::#
    #:: include "task/" ~ cookiecutter.task ~ "/small.py" ::#
    #:: endfilter ::#
]


def learning_rate(step: int, scheduled_steps: int, optim: Any) -> float:
    """Return a linear warm-up to the peak, followed by half a cosine down to a fraction of it."""
    if step < optim.warmup_steps:
        return float(optim.lr * (step + 1) / optim.warmup_steps)
    done = min(1.0, (step - optim.warmup_steps) / (scheduled_steps - optim.warmup_steps))
    cosine = (1 + math.cos(math.pi * done)) / 2
    return float(optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * cosine))


@torch.no_grad()
def update(name: str, weight: Tensor, gradient: Tensor, state: Any, lr: float, optim: Any) -> None:
    """Change a weight, and its state, by AdamW (Loshchilov and Hutter 2019, algorithm 2)."""
    first_beta, second_beta = optim.betas
    state["step"] = state.get("step", 0) + 1
    state["first"] = first_beta * state.get("first", 0) + (1 - first_beta) * gradient
    state["second"] = second_beta * state.get("second", 0) + (1 - second_beta) * gradient**2
    # Only matrices and kernels decay, but no bias and no weight of a normalization.
    if weight.dim() > 1:
        weight.mul_(1 - lr * optim.weight_decay)
    mean = state["first"] / (1 - first_beta ** state["step"])
    variance = state["second"] / (1 - second_beta ** state["step"])
    weight.sub_(lr * mean / (variance.sqrt() + optim.eps))
