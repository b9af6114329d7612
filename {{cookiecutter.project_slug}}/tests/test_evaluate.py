"""Evaluation counts every sample once, and gives the same metrics on any number of ranks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
#:: if not fact("loop") ::#
import torch
#:: endif ::#

import plain
from support import EVALUATES_ON, TOLERANCE, checkpoints, launch, load, module, read_records, settings


def plain_metrics(run: Path, split: str) -> dict[str, Any]:
    """Compute the metrics of a run's last checkpoint in plain PyTorch, without launcher and process group."""
    #:: if fact("loop") ::#
    config = settings()
    #:: else ::#
    config, dataset = settings(), module("dataset")
    plain.seed_everything(config.run.seed)
    samples = dataset.build_datasets(config)[["train", "validation", "test"].index(split)]
    task = module("task").Task(config, torch.device("cpu"))
    #:: endif ::#
    model = module("model").build_model(config.model)
    model.load_state_dict(load(run)["model"])
    #:: if not fact("loop") ::#
    batch = dataset.collate_fn(plain.read(samples, config.run.seed, 0, range(len(samples))))
    with torch.no_grad():
        inputs, targets = task.prepare(*batch)
        metrics = task.metrics(model.eval()(inputs), targets)
    return {"num_samples": len(samples), **task.aggregate({name: values.numpy() for name, values in metrics.items()})}
    #:: else ::#
    return plain.evaluate(model, config, first=100 if split == "validation" else 0)
    #:: endif ::#


@pytest.mark.parametrize("nproc", EVALUATES_ON)
def test_every_sample_counts_once(trained: Callable[..., Path], record_property: Any, nproc: int) -> None:
    run = trained()
    # Another number of samples per batch than in training, and settings of model and dataset from the checkpoint.
    words = ("--checkpoint", str(checkpoints(run)[-1]), "--distributed.device=cpu", "--data.eval_batch_size=50")
    out, _ = launch("evaluate", *words, "--run.seed=7", nproc=nproc)
    for record in (read_records(run, "eval")[-1], json.loads(out.splitlines()[-1])):
        for name, value in plain_metrics(run, record["split"]).items():
            assert record[name] == pytest.approx(value, rel=TOLERANCE), name
            if name == "loss":
                record_property(name, f"{abs(record[name] / value - 1):.1e} (&le; {TOLERANCE:.0e})")
