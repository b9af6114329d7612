"""What the proof requires of dataset, task and model; a failure names what depends on the split."""

from typing import Any

import pytest
import torch
from torch import nn
#:: if not fact("loop") ::#
from torch.utils._pytree import tree_leaves
#:: endif ::#

import plain
from support import TOLERANCE, module, settings

SAMPLES = 8
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


@pytest.fixture
def samples() -> Any:
    """The training set."""
    return plain.build(settings())[0][0]


@pytest.fixture
def model() -> nn.Module:
    """The model in training mode, without dropout, with weights that give each layer an effect."""
    _, _, model = plain.build(settings())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    for layer in model.modules():
        if isinstance(layer, DROPOUTS):
            layer.p = 0.0
    return model


#:: if fact("loop") ::#
#:: include "task/" ~ cookiecutter.task ~ "/compute.py" ::#
#:: else ::#
def read(samples: Any, indices: Any, epoch: int = 3) -> list[torch.Tensor]:
    """Return the tensors of a batch of samples in an epoch."""
    batch = module("dataset").collate_fn(plain.read(samples, 7, epoch, indices))
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def compute(model: nn.Module, samples: Any, indices: range) -> tuple[Any, Any]:
    """Return the losses and the weight of a batch, and the metrics of its samples."""
    task = module("task").Task(settings(), torch.device("cpu"))
    batch = module("dataset").collate_fn(plain.read(samples, seed=7, epoch=0, indices=indices))
    inputs, targets = task.prepare(*batch)
    outputs = model(inputs)
    weight = torch.as_tensor(task.weight(targets), dtype=torch.float32)
    return {**task.losses(outputs, targets), "weight": weight}, task.metrics(outputs, targets)


def test_a_sample_is_a_function_of_seed_epoch_and_index(samples: Any) -> None:
    first_reads = [read(samples, [index]) for index in range(SAMPLES)]
    for index in reversed(range(SAMPLES)):
        for again, first in zip(read(samples, [index]), first_reads[index], strict=True):
            assert torch.equal(again, first), (
                "a sample differs when it is read again: keep no state, and draw from random, "
                "numpy.random or torch, which are seeded for each sample"
            )


def test_the_datasets_are_a_function_of_the_seed() -> None:
    builds: dict[int, Any] = {3: [], 4: []}
    for epoch, leaves in builds.items():
        for dataset in plain.build(settings())[0]:
            read(dataset, range(SAMPLES), epoch)  # A sample that is kept would be read again below.
            leaves += read(dataset, range(SAMPLES))
    for ours, theirs in zip(*builds.values(), strict=True):
        assert torch.equal(ours, theirs), (
            "build_datasets returns other samples when it is called again, as each rank does, or "
            "after another epoch: draw from random, numpy.random or torch, which are seeded"
        )
#:: endif ::#


@torch.no_grad()
@pytest.mark.parametrize("trains", [True, False])
def test_forward_draws_and_changes_nothing(model: nn.Module, samples: Any, trains: bool) -> None:
    model.train(trains)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first_results = compute(model, samples, range(SAMPLES))
    for name, value in model.state_dict().items():
        if not name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            assert torch.equal(value, before[name]), (
                f"forward changes {name}, in each micro-batch again; do so in train.py, once a step"
            )
    # The sample that is read last has seeded the random numbers: another one, in reverse.
    results = compute(model, samples, range(SAMPLES)[::-1])
    for numbers, first_numbers in zip(results, first_results, strict=True):
        for name, values in numbers.items():
            first_sum = float(torch.as_tensor(first_numbers[name]).double().sum())
            total = float(torch.as_tensor(values).double().sum())
            assert total == pytest.approx(first_sum, rel=TOLERANCE, abs=TOLERANCE), (
                f"{name} depends on random numbers or earlier batches; draw in the dataset"
            )


@torch.no_grad()
def test_a_sample_does_not_depend_on_the_others_of_its_batch(model: Any, samples: Any) -> None:
    sums, metrics = compute(model, samples, range(SAMPLES))
    singles = [compute(model, samples, range(index, index + 1)) for index in range(SAMPLES)]
    for name, values in metrics.items():
        single_values = [single_metrics[name] for _, single_metrics in singles]
        for value in single_values:
            assert value.shape == (1, *values.shape[1:]), (
                f"Task.metrics returns {name} of shape {tuple(value.shape)} for 1 sample: the "
                "first dimension alone is the batch; do outputs and targets have one shape?"
            )
        if values.is_floating_point():
            difference = values - torch.cat(single_values)
            assert difference.norm() <= TOLERANCE * values.norm(), (
                f"{name} of a sample depends on the other samples of its batch: normalize each "
                "sample by itself (BatchNorm does not), and mask what is padded"
            )
    for name, total in sums.items():
        single_total = sum(float(single_sums[name]) for single_sums, _ in singles)
        assert single_total == pytest.approx(float(total), rel=TOLERANCE), (
            f"{name} of a batch is not the sum over its samples: return sums from Task.losses, not "
            "means, and from Task.weight what they are divided by"
        )
