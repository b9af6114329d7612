"""Guarantee 2: evaluation counts every sample once, and gives the same figures on any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from support import RANKS, SPLITS, launch, load_model, name_of_split, newest_checkpoint, read_records, settings

dataset = import_module("{{ cookiecutter.__package }}.dataset")
model = import_module("{{ cookiecutter.__package }}.model")


def plain_figures(run: Path) -> dict[str, Any]:
    """What plain PyTorch computes from a run's last checkpoint, with no launcher and no process group."""
    config = settings()
    _, test_set = dataset.build_datasets(config)
    network = model.build_model(config.model)
    network.load_state_dict(load_model(run))
    samples = [test_set[0, index] for index in range(len(test_set))]
    inputs, targets = (torch.stack(column) for column in zip(*samples, strict=True))
    with torch.no_grad():
        scores = dataset.score(network.eval()(inputs), targets)
    figures = dataset.figures({name: values.numpy() for name, values in scores.items()})
    return {"num_samples": len(test_set), **figures}


def assert_figures(record: dict[str, Any], expected: dict[str, Any]) -> None:
    assert record.keys() >= expected.keys()
    for name, value in expected.items():
        assert record[name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize(("nproc", "words"), SPLITS, ids=name_of_split)
def test_a_run_counts_every_sample_once(trained: Callable[..., Path], nproc: int, words: list[str]) -> None:
    run = trained(nproc, *words)
    assert_figures(read_records(run, "eval")[-1], plain_figures(run))


def test_evaluate_tells_the_same_in_one_process(trained: Callable[..., Path]) -> None:
    run = trained(RANKS)
    done = launch("evaluate", "--checkpoint", str(newest_checkpoint(run)), nproc=1)
    assert_figures(json.loads(done.stdout.splitlines()[-1]), plain_figures(run))
