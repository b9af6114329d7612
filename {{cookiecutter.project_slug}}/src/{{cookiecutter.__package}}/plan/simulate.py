"""A training step of one rank, simulated in this process: the project's own strategy and step, on fake tensors."""

import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..launch import PlanOptions
from ..runtime import Process
from ..splitting import GlobalMean, split_batch
from .fakes import FakeTensors, fake_process_group
from .layout import Layout
from .ledger import Ledger
from .messages import Message

CPU = torch.device("cpu")
# The first step creates the optimizer's state; in the second, buckets of gradients may be arranged anew.
WARM_UP = 2


@dataclass(frozen=True)
class Project:
    """What is simulated.

    Attributes:
        parts: The module ``train.py``, with the model, the data, the strategy, the optimizer and the step.
        config: The settings.
        options: The machines.
    """

    parts: Any
    config: Any
    options: PlanOptions

    def change(self, section: str, **values: Any) -> "Project":
        """Return the project with other settings in a section."""
        changed = replace(getattr(self.config, section), **values)
        return replace(self, config=replace(self.config, **{section: changed}))

    @property
    def layout(self) -> Layout:
        """Return what a simulation has to know of the strategy."""
        return Layout(self.config.parallel, self.options)

    def build_model(self) -> Any:
        """Build the whole model."""
        return self.parts.build_model(self.config.model)

    def build_strategy(self, process: Process) -> Any:
        """Build the strategy of a rank."""
        return self.parts.Parallel(self.build_model, self.parts.dataset.loss_fn, self.config, process)


@dataclass(frozen=True)
class Whole:
    """What is known of the whole model.

    Attributes:
        parameters: Number of its parameters.
        lengths: First dimensions of its parameters, ascending.
        loss: The names of its losses, and their weight.
    """

    parameters: int
    lengths: list[int]
    loss: Any


@dataclass(frozen=True)
class Figures:
    """What a step takes on one rank.

    Attributes:
        peak: Most bytes in use in the first steps.
        memory: These bytes by kind.
        messages: Collectives and point-to-point messages of a step.
        flops: Floating-point operations of a step.
        strategy: The strategy of the rank, whose schedule is built.
    """

    peak: int
    memory: dict[str, int]
    messages: list[Message]
    flops: int
    strategy: Any


class Rehearsal:
    """What ``Trainer.step`` uses of a trainer, without data, records and checkpoints."""

    def __init__(self, project: Project, process: Process) -> None:
        parts, config = project.parts, project.config
        self.config, self.process, self.parallel = config, process, project.build_strategy(process)
        self.optimizer = parts.build_optimizer(self.parallel.module, config.optim, lambda *_: None)
        self.scheduler = parts.Schedule(self.optimizer, config.optim, planned_steps=1)
        self.scaler = torch.amp.GradScaler(process.device.type, enabled=config.train.precision == "fp16")
        self.guard = parts.FiniteGuard(self.parallel.module, config.train.on_nonfinite, self.scaler)
        self.pace = parts.Pace(self.parallel, config.data.global_batch_size, process.device, None)


def read_batch(project: Project) -> tuple[Any, Any]:
    """Return a rank's share of the first global batch, from the project's own loader.

    Nothing is collected for it: a loader that would has ``blank_batch``.
    """
    parts, config = project.parts, project.config
    train_set, _ = parts.dataset.build_datasets(config)
    shares = SimpleNamespace(dp_rank=0, dp_size=config.parallel.dp_size(project.options.ranks), device=CPU)
    data, seed = replace(config.data, num_workers=0), config.run.seed
    _, loader = parts.build_train_loader(train_set, shares, data, seed, lambda *_, **__: None, nullcontext)
    batch = loader.blank_batch() if hasattr(loader, "blank_batch") else next(iter(loader))
    inputs, targets = parts.unpack(batch)
    return inputs, targets


def describe(project: Project, batch: tuple[Any, Any]) -> Whole:
    """Compute the loss of the whole model for a micro-batch, without values."""
    microbatches = project.config.train.microbatches
    with FakeTensors(), torch.no_grad():
        model, mean = project.build_model(), GlobalMean(1, 1, CPU)
        inputs, targets = split_batch(to_fake(batch), microbatches)[0]
        mean.add(project.parts.dataset.loss_fn(model(inputs), targets))
    lengths = sorted({p.shape[0] for p in model.parameters() if p.dim()})
    return Whole(sum(p.numel() for p in model.parameters()), lengths, mean.kind)


def simulate(project: Project, batch: tuple[Any, Any], whole: Whole, rank: int) -> Figures:
    """Take the first steps as ``rank``; returns the figures of the last."""
    ranks, per_node = project.options.ranks, project.options.ranks_per_node()
    process = Process(
        rank=rank, world_size=ranks, local_rank=rank % per_node, local_world_size=per_node, device=CPU, launcher="plan"
    )
    ledger = Ledger()
    warnings.simplefilter("ignore")  # They are about tensors without values.
    with fake_process_group(rank, ranks), project.layout.simulated(), FakeTensors(), ledger, ledger.watch():
        inputs, targets = to_fake(batch)
        trainer = Rehearsal(project, process)
        module, losses = trainer.parallel.module, trainer.parallel.losses
        losses.kind, losses.is_agreed = whole.loss, True  # Ranks agree on it by messages, which have no content here.
        ledger.classify([*module.parameters(), *module.buffers()], "weights")
        trainer.optimizer.register_step_pre_hook(
            lambda *_: ledger.classify([p.grad for p in module.parameters() if p.grad is not None], "gradients")
        )
        ledger.reset_peak()
        for _ in range(WARM_UP + 1):
            ledger.begin_step()
            project.parts.Trainer.step(trainer, inputs, targets)
            state = tree_leaves(list(trainer.optimizer.state.values()))
            ledger.classify([leaf for leaf in state if isinstance(leaf, Tensor)], "optimizer")
        return Figures(ledger.peak, ledger.peak_by_kind(), ledger.messages, ledger.flops, trainer.parallel)


def to_fake(batch: Any) -> Any:
    """Return a batch of the same shapes, in a simulation without values."""
    return tree_map_only(Tensor, lambda part: torch.empty(part.shape, dtype=part.dtype), batch)
