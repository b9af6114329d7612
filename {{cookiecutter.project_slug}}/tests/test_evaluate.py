"""Evaluation counts every sample once, and gives the same metrics on any number of ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
#:: if not fact("loop") ::#
import torch
#:: endif ::#

import plain
from support import EVALUATES_ON, TOLERANCE, checkpoints, launch, load, read_records, settings


def plain_metrics(run_dir: Path, split: str) -> dict[str, Any]:
    """Compute the metrics of a run's last checkpoint in plain PyTorch, without a process group."""
    config = settings()
    #:: if fact("loop") ::#
    _, _, model = plain.build(config)
    #:: else ::#
    datasets, task, model = plain.build(config)
    #:: endif ::#
    model.load_state_dict(load(run_dir)["model"])
    #:: if fact("loop") ::#
    return plain.evaluate(model, config, first=100 if split == "validation" else 0)
    #:: else ::#
    samples = datasets[["train", "validation", "test"].index(split)]
    every_sample = plain.read(samples, config.run.seed, 0, range(len(samples)))
    with torch.no_grad():
        inputs, targets = task.prepare(*plain.module("dataset").collate_fn(every_sample))
        metrics = task.metrics(model.eval()(inputs), targets)
    arrays = {name: values.numpy() for name, values in metrics.items()}
    return {"num_samples": len(samples)} | task.aggregate(arrays)
    #:: endif ::#


@pytest.mark.parametrize("nproc", EVALUATES_ON)
def test_every_sample_counts_once(trained: Any, record_property: Any, nproc: int) -> None:
    run_dir = trained()
    # The batch has another size than in training. Model and dataset are those of the checkpoint.
    words = ["--checkpoint", str(checkpoints(run_dir)[-1]), "--distributed.device", "cpu"]
    words += ["--data.eval_batch_size", "50", "--run.seed", "7"]
    out, _ = launch("evaluate", *words, nproc=nproc)
    for record in (read_records(run_dir, "eval")[-1], json.loads(out.splitlines()[-1])):
        for name, value in plain_metrics(run_dir, record["split"]).items():
            assert record[name] == pytest.approx(value, rel=TOLERANCE), name
            if name == "loss":
                record_property(name, f"{abs(record[name] / value - 1):.1e} (&le; {TOLERANCE})")
