"""Refuses settings that are well-formed but cannot work together, before anything is started.

Imports no PyTorch, so that it takes no time.
"""

from __future__ import annotations

import math

from .config import Config, UserError, to_dict


def check(config: Config, world_size: int, training: bool) -> None:
    """Refuse settings that cannot work on ``world_size`` ranks; ``training`` is False if the model is only run.

    Raises:
        UserError: naming the setting, and what would work.
    """
    for name, section in to_dict(config).items():
        for key, value in section.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"{name}.{key} is {value}; give a finite number")
    if config.run.seed >= 2**32:
        raise UserError(f"run.seed is {config.run.seed}; give a number below 2**32")
    if not all(0 <= beta < 1 for beta in config.optim.betas):
        raise UserError(f"optim.betas is {list(config.optim.betas)}; give two numbers from 0 to below 1")
    config.model.check()
    #:: if cookiecutter.task == "language" ::#
    config.dataset.check()
    #:: endif ::#
    check_layout(config, world_size)
    if training:
        check_batch(config, world_size)


def check_batch(config: Config, world_size: int) -> None:
    """Refuse a global batch that does not divide into equal shares and micro-batches.

    Raises:
        UserError: naming it, and the nearest that would.
    """
    shares, pieces = config.parallel.data_size(world_size), config.train.microbatches
    batch, unit = config.data.global_batch_size, shares * pieces
    if batch % unit:
        fits = " or ".join(str(size) for size in (batch // unit * unit, -(-batch // unit) * unit) if size)
        raise UserError(
            f"data.global_batch_size is {batch}, which does not divide into {shares} share(s) x {pieces} "
            f"micro-batch(es); {fits} would"
        )


#:: include "parallelism/" ~ cookiecutter.parallelism ~ ".checks.py" ::#
