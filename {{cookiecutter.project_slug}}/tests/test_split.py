"""Losses and weights do not depend on how the work is split."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support import (
    SPLITS,
    STEPS,
    TOLERANCE,
    assert_close,
    global_batches,
    load_model,
    module,
    read_records,
    settings,
    split_id,
)

dataset, optim = module("dataset"), module("optim")
build_model, read_loss = module("model").build_model, module("splitting").read_loss


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of a plain loop: one process, no launcher, no process group, nothing split."""
    config = settings("--train.max_steps", str(STEPS))
    torch.manual_seed(config.run.seed)
    model = build_model(config.model)
    optimizer = optim.build_optimizer(model, config.optim, register=lambda *_: None)
    steps_per_epoch, batches = global_batches(config)
    planned_steps, _ = optim.count_steps(steps_per_epoch, config.train, config.optim)
    scheduler = optim.build_scheduler(optimizer, config.optim, planned_steps)
    losses = []
    for inputs, targets in batches:
        losses_of_batch, weight = read_loss(dataset.loss_fn(model(inputs), targets))
        loss = losses_of_batch["loss"] / weight
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.clip_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) == STEPS:
            break
    return losses, model.state_dict()


@pytest.mark.parametrize(("nproc", "words"), SPLITS, ids=split_id)
def test_a_split_gives_the_result_of_a_plain_loop(
    plain: tuple[list[float], dict[str, torch.Tensor]], trained: Callable[..., Path], nproc: int, words: list[str]
) -> None:
    run, (losses, expected) = trained(nproc, *words), plain
    assert [record["loss"] for record in read_records(run, "train")] == pytest.approx(losses, rel=TOLERANCE)
    assert_close(load_model(run), expected)
