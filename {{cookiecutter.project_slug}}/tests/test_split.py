"""Losses and weights do not depend on how the work is split."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from support import SPLITS, STEPS, TOLERANCE, assert_close, load_model, module, read_records, settings, split_id

data, dataset, train = module("data"), module("dataset"), module("train")
build_model = module("model").build_model


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of a plain loop: one process, no launcher, no process group, nothing split."""
    config = settings()
    torch.manual_seed(config.run.seed)
    model: Any = build_model(config.model)
    train_set, _ = dataset.build_datasets(config)
    batch = config.data.global_batch_size
    sampler = data.TrainSampler(train_set, 0, 1, batch, config.run.seed)
    optimizer = train.build_optimizer(model, config.optim)
    steps_per_epoch = len(train_set) // batch
    assert steps_per_epoch < STEPS, "no step is in a second epoch, which has its own order"
    scheduler = train.build_scheduler(optimizer, config.optim, config.train.epochs * steps_per_epoch)
    losses = []
    for step in range(STEPS):
        sampler.set_epoch(step // steps_per_epoch)
        keys = islice(sampler, step % steps_per_epoch * batch, (step % steps_per_epoch + 1) * batch)
        inputs, targets = (torch.stack(column) for column in zip(*(train_set[key] for key in keys), strict=True))
        loss = dataset.loss_fn(model(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.clip_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize(("nproc", "words"), SPLITS, ids=split_id)
def test_a_split_gives_the_result_of_a_plain_loop(
    plain: tuple[list[float], dict[str, torch.Tensor]], trained: Callable[..., Path], nproc: int, words: list[str]
) -> None:
    run, (losses, expected) = trained(nproc, *words), plain
    assert [record["loss"] for record in read_records(run, "train")] == pytest.approx(losses, rel=TOLERANCE)
    assert_close(load_model(run), expected)
