"""What the proof requires of the dataset, the task and the model: each failure names in words what breaks it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
#:: if not fact("loop") ::#
from torch.utils._pytree import tree_leaves

import plain
#:: else ::#

#:: endif ::#
from support import TOLERANCE, module, settings

SAMPLES, DROPOUTS = 8, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


@pytest.fixture
def config() -> Any:
    """The settings, of which datasets may decide some of the model."""
    return settings()


@pytest.fixture
def samples(config: Any) -> Any:
    """The training set."""
    return module("dataset").build_datasets(config)[0]


@pytest.fixture
def model(config: Any, samples: Any) -> nn.Module:
    """The model in training mode, without dropout, at weights at which every layer has an effect."""
    torch.manual_seed(0)
    model: nn.Module = module("model").build_model(config.model)
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
def read(samples: Any, indices: Any) -> list[Tensor]:
    """Return the tensors of a batch."""
    batch = module("dataset").collate_fn(plain.read(samples, 7, 3, indices))
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def compute(model: nn.Module, samples: Any, indices: range) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the losses and the weight of a batch, and the metrics of its samples."""
    task = module("task").Task(settings(), torch.device("cpu"))
    batch = module("dataset").collate_fn(plain.read(samples, 7, 0, indices))
    inputs, targets = task.prepare(*batch)
    outputs = model(inputs)
    sums = {**task.losses(outputs, targets), "weight": torch.as_tensor(task.weight(targets), dtype=torch.float32)}
    return sums, task.metrics(outputs, targets)


def test_a_sample_is_a_function_of_seed_epoch_and_index(samples: Any) -> None:
    first = [read(samples, [i]) for i in range(SAMPLES)]
    for i in reversed(range(SAMPLES)):
        for ours, theirs in zip(read(samples, [i]), first[i], strict=True):
            assert torch.equal(ours, theirs), (
                "a sample differs when it is read again: it depends on a counter, the time, a generator of its own or "
                "the samples read before; draw from random, numpy.random or torch, which are seeded for each sample"
            )


def test_the_datasets_are_a_function_of_the_seed() -> None:
    config, drawn = settings(), list[Any]()
    for _ in range(2):
        plain.seed_everything(config.run.seed)
        drawn.append([leaf for each in module("dataset").build_datasets(config) for leaf in read(each, range(SAMPLES))])
    for ours, theirs in zip(*drawn, strict=True):
        assert torch.equal(ours, theirs), (
            "build_datasets returns other samples when it is called again, so each rank and each start has its own; "
            "split with random, numpy.random or torch, which are seeded, or with a generator of a fixed seed"
        )
#:: endif ::#


@torch.no_grad()
def test_a_sample_does_not_depend_on_the_others_of_its_batch(model: nn.Module, samples: Any) -> None:
    whole = compute(model, samples, range(SAMPLES))
    singles = [compute(model, samples, range(i, i + 1)) for i in range(SAMPLES)]
    for name, values in whole[1].items():
        for single in singles:
            assert single[1][name].shape == (1, *values.shape[1:]), (
                f"Task.metrics returns {name} of shape {tuple(single[1][name].shape)} for 1 sample: the first "
                "dimension, and no other, is the batch; do outputs and targets have the same shape?"
            )
        parts = torch.cat([single[1][name] for single in singles])
        if values.is_floating_point():
            assert (values - parts).norm() <= TOLERANCE * values.norm(), (
                f"{name} of a sample depends on the other samples of its batch, through BatchNorm's statistics or the "
                "padding; normalize each sample by itself, and mask what is padded"
            )
    for name, value in whole[0].items():
        assert float(sum(single[0][name] for single in singles)) == pytest.approx(float(value), rel=TOLERANCE), (
            f"{name} of a batch is not the sum over its samples: return sums from Task.losses, not means, and from "
            "Task.weight what they are divided by"
        )


def test_every_parameter_gets_a_gradient(model: nn.Module, samples: Any) -> None:
    task = module("task").Task(settings(), torch.device("cpu"))
    of_task = [name for name, part in vars(task).items() if isinstance(part, nn.Parameter)]
    assert not of_task, f"nothing would train {of_task} of Task: let the model have them"
    compute(model, samples, range(SAMPLES))[0]["loss"].backward()
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not unused or settings().train.allow_unused, f"the loss does not depend on {unused}: use or freeze them"
