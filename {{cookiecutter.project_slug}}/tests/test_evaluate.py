"""Guarantee 2: evaluation counts every sample once, and gives the same figures on any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from support import EVALUATIONS, RANKS, launch, load_model, newest_checkpoint, settings

dataset = import_module("{{ cookiecutter.__package }}.dataset")
model = import_module("{{ cookiecutter.__package }}.model")


@pytest.fixture(scope="module")
def expected(trained: Callable[..., Path]) -> dict[str, Any]:
    """The figures that plain PyTorch computes from a checkpoint, with no launcher and no process group."""
    config = settings()
    _, test_set = dataset.build_datasets(config)
    network = model.build_model(config.model)
    network.load_state_dict(load_model(trained(RANKS)))
    samples = [test_set[0, index] for index in range(len(test_set))]
    inputs, targets = (torch.stack(column) for column in zip(*samples, strict=True))
    with torch.no_grad():
        scores = dataset.score(network.eval()(inputs), targets)
    figures = dataset.figures({name: values.numpy() for name, values in scores.items()})
    return {"num_samples": len(test_set), **figures}


@pytest.mark.parametrize(("nproc", "words"), EVALUATIONS)
def test_every_sample_counts_once(
    trained: Callable[..., Path], expected: dict[str, Any], nproc: int, words: list[str]
) -> None:
    done = launch("evaluate", "--checkpoint", str(newest_checkpoint(trained(RANKS))), *words, nproc=nproc)
    record = json.loads(done.stdout.splitlines()[-1])
    assert record.keys() >= expected.keys()
    for name, value in expected.items():
        assert record[name] == pytest.approx(value, rel=1e-5), name
