"""What the guarantees need from ``dataset.py`` and ``model.py``: each failure says in words what breaks them."""

import copy
#:: if not cookiecutter.__plays ::#
import itertools
#:: endif ::#
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from support import global_batches, module, settings

dataset, splitting = module("dataset"), module("splitting")
SAMPLES = 8


@pytest.fixture
def batch() -> Any:
    """Samples of the first training batch, as ``(inputs, targets)``."""
    config = settings("--data.global_batch_size", str(SAMPLES))
    return splitting.unpack(next(global_batches(config)[1]))


@pytest.fixture
def model() -> nn.Module:
    """The model in training mode, without dropout, which draws other numbers for another batch."""
    torch.manual_seed(0)
    model = module("model").build_model(settings().model)
    for layer in model.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            layer.p = 0.0
    return model


def same(ours: Any, theirs: Any) -> bool:
    """Return whether the tensors of two batches are bitwise equal."""
    pairs = zip(tree_leaves(ours), tree_leaves(theirs), strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def test_a_sample_is_a_function_of_seed_epoch_and_index() -> None:
    config = settings()
    train_set, _ = dataset.build_datasets(config)
    if hasattr(train_set, "build_loader"):
        reads = [next(global_batches(config)[1]) for _ in range(2)]
    elif isinstance(train_set, IterableDataset):
        streams = [splitting.Stream(train_set, list, 0, 1, SAMPLES, 0, config.run.seed) for _ in range(2)]
        reads = [copy.deepcopy(next(iter(stream))) for stream in streams]
    else:
        seeded = splitting.SeededDataset(train_set, list, config.run.seed)
        keys = [(3, index) for index in range(SAMPLES)]
        first = copy.deepcopy(seeded.__getitems__(keys))  # A sample may be a view of what the next read changes.
        reads = [first, [*reversed(seeded.__getitems__(keys[::-1]))]]
    assert same(*reads), (
        "the same samples differ when they are read again: a sample depends on global state, such as a counter, the "
        "time or a generator of its own; draw from torch, random or numpy.random, which are seeded for each sample"
    )


def test_an_output_depends_on_its_own_sample_alone(model: nn.Module, batch: Any) -> None:
    inputs, _ = batch
    with torch.no_grad():
        whole, half = (tree_leaves(model(each)) for each in (inputs, splitting.split_batch(inputs, 2)[0]))
    for a, b in zip(whole, half, strict=True):
        assert torch.allclose(a[: len(b)], b, rtol=1e-4, atol=1e-5), (
            "the model's output for a sample depends on the other samples of its batch, as with the batch statistics "
            "of BatchNorm, or on random numbers, so the result depends on the split; normalize each sample by itself, "
            "as LayerNorm does"
        )


def test_every_parameter_gets_a_gradient(model: nn.Module, batch: Any) -> None:
    inputs, targets = batch
    losses, _ = splitting.read_loss(dataset.loss_fn(model(inputs), targets))
    losses["loss"].backward()
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not unused, f"the loss does not depend on {', '.join(unused)}: use these parameters, or freeze them"


def test_losses_and_weights_add_up(model: nn.Module, batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    watch(monkeypatch, calls := [])
    with torch.no_grad():
        outputs = model(batch[0])
        whole = measure(outputs, batch[1])
        #:: if cookiecutter.__plays ::#
        # The advantages of half a batch would be normalized over that half.
        halves = zip(*(splitting.split_batch(each, 2) for each in batch), strict=True)
        #:: else ::#
        halves = itertools.islice(global_batches(settings("--data.global_batch_size", str(SAMPLES // 2)))[1], 2)
        #:: endif ::#
        parts = [measure(model(inputs), targets) for inputs, targets in map(splitting.unpack, halves)]
    if calls:
        pytest.skip("this loss compares the samples of the global batch, so it is no sum over samples")
    for name, total in whole.items():
        assert sum(part[name] for part in parts) == pytest.approx(total, rel=1e-4), (
            f"loss_fn's {name} of a batch is not the sum over its parts: return the sum of the losses, not their mean, "
            "and the weight that the sum counts for (samples, or tokens that are not ignored). If it is a sum, then "
            "collate_fn draws random numbers, or the padding of a batch, which differs between parts, has an effect"
        )


def watch(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    """Count calls of ``gather_global_batch``, wherever it was imported."""
    gather: Callable[[Tensor], Any] = splitting.gather_global_batch
    for owner in (splitting, dataset):
        if hasattr(owner, "gather_global_batch"):
            monkeypatch.setattr(owner, "gather_global_batch", lambda own: (calls.append(1), gather(own))[1])


def measure(outputs: Any, targets: Any) -> dict[str, float]:
    """Return the sums and the weight of a batch."""
    losses, weight = splitting.read_loss(dataset.loss_fn(outputs, targets))
    return {**{name: float(value) for name, value in losses.items()}, "weight": float(weight)}
