"""Evaluation counts every sample once, and gives the same metrics on any number of ranks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
#:: if not cookiecutter.__plays ::#
import torch
#:: endif ::#

import plain
from support import RANKS, SEED, SPLITS, launch, load_model, module, newest_checkpoint, read_records, settings, split_id

dataset, build_model = module("dataset"), module("model").build_model


def plain_metrics(run: Path) -> dict[str, Any]:
    """Compute the metrics of a run's last checkpoint in plain PyTorch, without launcher and process group.

    What a metric is, the dataset says here too; ``test_dataset.py`` checks it.
    """
    config = settings(*SEED)
    #:: if not cookiecutter.__plays ::#
    _, test_set = dataset.build_datasets(config)
    #:: endif ::#
    model = build_model(config.model)
    model.load_state_dict(load_model(run))
    #:: if cookiecutter.__plays ::#
    played = plain.play(model.eval(), config)
    return {"num_samples": len(played["return"]), **dataset.aggregate_metrics(played)}
    #:: else ::#
    inputs, targets = dataset.collate_fn(plain.read(test_set, config.run.seed, 0, range(len(test_set))))
    with torch.no_grad():
        per_sample = dataset.per_sample_metrics(model.eval()(inputs), targets)
    metrics = dataset.aggregate_metrics({name: values.numpy() for name, values in per_sample.items()})
    return {"num_samples": len(test_set), **metrics}
    #:: endif ::#


def assert_metrics(record: dict[str, Any], expected: dict[str, Any]) -> None:
    assert record.keys() >= expected.keys()
    for name, value in expected.items():
        assert record[name] == pytest.approx(value, rel=1e-5), f"{name}: was each sample counted once, in order?"


@pytest.mark.parametrize(("nproc", "words"), SPLITS, ids=split_id)
def test_a_run_counts_every_sample_once(trained: Callable[..., Path], nproc: int, words: list[str]) -> None:
    run = trained(nproc, *words)
    assert_metrics(read_records(run, "eval")[-1], plain_metrics(run))


def test_evaluate_prints_the_same_in_one_process(trained: Callable[..., Path]) -> None:
    run = trained(RANKS)
    done = launch("evaluate", "--checkpoint", str(newest_checkpoint(run)), *SEED, nproc=1)
    assert_metrics(json.loads(done.stdout.splitlines()[-1]), plain_metrics(run))
