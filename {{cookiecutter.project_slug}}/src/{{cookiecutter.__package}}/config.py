"""Settings: typed, one docstring a field; ``commandline.py`` reads them.

This module imports neither PyTorch nor any other module of the package, so a mistake in the settings is found in a
fraction of a second, before any process is started.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NoReturn, get_type_hints

from jsonargparse import set_parsing_settings
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

set_parsing_settings(docstring_parse_attribute_docstrings=True)


class UserError(Exception):
    """Something that the user has to change; its text is one line that says what and how."""


@dataclass
class RunConfig:
    """Where the run writes, and what makes it repeatable."""

    dir: str = "runs/default"
    """Directory of everything that the run leaves behind; made if missing. Where it is given, evaluate appends its
    record to metrics.jsonl there; otherwise it only prints."""
    seed: NonNegativeInt = 0
    """Seed of the initial weights, the order of the data and its augmentation."""


@dataclass
class DataConfig:
    """How samples become batches, whatever they hold."""

    #:: if cookiecutter.task == "digits" ::#
    global_batch_size: PositiveInt = 64
    #:: else ::#
    global_batch_size: PositiveInt = 32
    #:: endif ::#
    """Samples that one optimizer step sees, over all ranks together."""
    eval_batch_size: PositiveInt = 256
    """Samples in one forward pass of evaluation, on each rank."""
    num_workers: NonNegativeInt = 0
    """Loader processes of each rank; 0 loads in the rank itself."""


#:: include "task/" ~ cookiecutter.task ~ "/config.py" ::#


#:: include "parallelism/" ~ cookiecutter.parallelism ~ ".config.py" ::#


@dataclass
class OptimConfig:
    """AdamW, with a linear warm-up and a cosine decay."""

    lr: PositiveFloat = 4e-3
    """Peak learning rate."""
    min_lr_ratio: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay, as a fraction of the peak."""
    warmup_steps: NonNegativeInt = 40
    """Steps over which the learning rate rises from zero to its peak."""
    decay_steps: PositiveInt | None = None
    """Step at which the decay ends; by default the last step of ``train.epochs``."""
    weight_decay: NonNegativeFloat = 0.05
    """Decoupled weight decay of matrices and kernels; biases and normalisation weights have none."""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW's decay rates of the first and the second moment."""
    #:: if cookiecutter.task == "digits" ::#
    eps: PositiveFloat = 1e-8
    """AdamW's term in the denominator."""
    #:: else ::#
    eps: PositiveFloat = 1e-6
    """AdamW's term in the denominator: gradients well below it, which may be rounding alone, make no whole steps."""
    #:: endif ::#


@dataclass
class TrainConfig:
    """The loop."""

    #:: if cookiecutter.task == "digits" ::#
    epochs: PositiveInt = 20
    #:: else ::#
    epochs: PositiveInt = 1
    #:: endif ::#
    """Passes over the training set."""
    max_steps: PositiveInt | None = None
    """Stop after this many optimizer steps; the schedule keeps its length, so a later run can go on from there."""
    #:: if cookiecutter.parallelism == "pipeline" ::#
    microbatches: PositiveInt = 8
    """Pieces of a pipeline's share of the batch that pass through the stages one after the other: the more, the less
    the stages wait for each other."""
    #:: else ::#
    microbatches: PositiveInt = 1
    """Pieces into which a rank cuts its share of the batch, to save memory; the result stays the same."""
    #:: endif ::#
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Arithmetic of forward and backward; weights stay in fp32, and fp16 scales its loss."""
    exact: bool = True
    """On NVIDIA GPUs: convolutions in full fp32 rather than TF32, by algorithms that give the same bits each time; turn
    it off for speed, where results may move in their last digits."""
    compile: bool = False
    """Compile every block of the model with torch.compile."""
    activation_checkpointing: bool = False
    """Keep only the inputs of blocks for backward, which computes the rest again: less memory, a third more work."""
    clip_grad_norm: PositiveFloat | None = 1.0
    """Largest norm of the whole gradient; null does not clip."""
    log_every: PositiveInt = 10
    """Steps between two lines of metrics; the device is waited for only then."""
    #:: if cookiecutter.task == "digits" ::#
    eval_every: PositiveInt | None = 110
    #:: else ::#
    eval_every: PositiveInt | None = 475
    #:: endif ::#
    """Steps between two evaluations; null evaluates at the end alone."""


@dataclass
class CheckpointConfig:
    """What is kept of a run, and where it goes on."""

    format: Literal["full", "sharded"] = "full"
    """full: a file that rank 0 puts together. sharded: a folder, for models too large for that; every rank writes what
    it holds, while training goes on. A run goes on from either; convert makes one of the other."""
    #:: if cookiecutter.task == "digits" ::#
    every_steps: PositiveInt | None = 110
    #:: else ::#
    every_steps: PositiveInt | None = 475
    #:: endif ::#
    """Steps between two checkpoints; null saves at the end and for a new best alone."""
    keep: PositiveInt = 2
    """Newest checkpoints to keep; the best one is kept besides."""
    resume: str = "auto"
    """auto: go on if run.dir holds a checkpoint; never: start fresh, and refuse a run.dir that holds one; or the path
    of a checkpoint to start from."""


@dataclass
class DistributedConfig:
    """The process group."""

    backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"
    """Library that moves the data; auto takes the device's own (NCCL on NVIDIA GPUs, gloo on CPUs)."""
    device: Literal["auto", "cpu"] = "auto"
    """auto: one accelerator a process where there is one, else the CPU."""
    init_method: str = "env://"
    """Where the ranks meet: env:// (from the launcher), tcp://host:port or file:///path."""
    timeout_seconds: PositiveFloat = 120.0
    """Longest wait for other ranks from the second step on; then the run ends with an error."""
    startup_timeout_seconds: PositiveFloat = 1800.0
    """The same until the first step is done, while ranks load data, compile and warm up."""


@dataclass
class Config:
    """All settings of a run, one section a concern."""

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    #:: if cookiecutter.task == "language" ::#
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    #:: endif ::#
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


def fail(message: str) -> NoReturn:
    """End this process with exit code 2 and one line on stderr, once a machine: its ranks have the same to say."""
    if speaks_for_machine():
        print("error:", " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


def speaks_for_machine() -> bool:
    """Whether a launcher numbered this process as the first of its machine, or none numbered it."""
    words = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
    return next((os.environ[word] for word in words if word in os.environ), "0") == "0"


def sections() -> dict[str, type]:
    """The sections of ``Config``: the name of each and the class that holds its settings."""
    return get_type_hints(Config)


def from_dict(settings: Mapping[str, Mapping[str, Any]]) -> Config:
    """Settings from nested dictionaries, as ``to_dict`` gives them."""

    def plain(value: Any) -> Any:
        # The parser's numbers know their bounds; a checkpoint that is read safely holds plain numbers alone.
        if isinstance(value, list | tuple):
            return type(value)(map(plain, value))
        number = next((kind for kind in (bool, int, float) if isinstance(value, kind)), None)
        return value if number is None else number(value)

    return Config(
        **{name: kind(**{k: plain(v) for k, v in settings[name].items()}) for name, kind in sections().items()}
    )


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """The settings as nested dictionaries of plain values."""
    return asdict(config)
