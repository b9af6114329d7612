"""Guarantee 1: losses and weights do not depend on how the work is split."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support import SPLITS, STEPS, TOLERANCE, assert_close, load_model, name_of_split, read_records, settings

data = import_module("{{ cookiecutter.__package }}.data")
dataset = import_module("{{ cookiecutter.__package }}.dataset")
model = import_module("{{ cookiecutter.__package }}.model")
train = import_module("{{ cookiecutter.__package }}.train")


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of a plain loop: one process, no launcher, no process group, nothing split."""
    config = settings()
    torch.manual_seed(config.run.seed)
    network: Any = model.build_model(config.model)
    train_set, _ = dataset.build_datasets(config)
    batch = config.data.global_batch_size
    sampler = data.TrainSampler(train_set, 0, 1, batch, config.run.seed)
    optimizer = train.build_optimizer(SimpleNamespace(module=network), config.optim)
    steps_an_epoch = len(train_set) // batch
    assert steps_an_epoch < STEPS, "no step of a second epoch, which has an order of its own"
    scheduler = train.build_scheduler(optimizer, config.optim, config.train.epochs * steps_an_epoch)
    losses = []
    for step in range(STEPS):
        sampler.set_epoch(step // steps_an_epoch)
        keys = islice(sampler, step % steps_an_epoch * batch, (step % steps_an_epoch + 1) * batch)
        inputs, targets = (torch.stack(column) for column in zip(*(train_set[key] for key in keys), strict=True))
        loss = dataset.loss_fn(network(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), config.train.clip_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, network.state_dict()


@pytest.mark.parametrize(("nproc", "words"), SPLITS, ids=name_of_split)
def test_a_split_gives_the_result_of_a_plain_loop(
    plain: tuple[list[float], dict[str, torch.Tensor]], trained: Callable[..., Path], nproc: int, words: list[str]
) -> None:
    run, (losses, expected) = trained(nproc, *words), plain
    assert [record["loss"] for record in read_records(run, "train")] == pytest.approx(losses, rel=TOLERANCE)
    assert_close(load_model(run), expected)
