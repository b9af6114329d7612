"""Settings, whose docstrings ``--help`` shows; without PyTorch, so that a mistake shows at once."""

import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from jsonargparse import set_parsing_settings

# A null is rejected where a type has no None: without a sentinel, it would mean "not given".
set_parsing_settings(docstring_parse_attribute_docstrings=True, unset_sentinel=True)
# The lowest and the highest value of a setting stand in its type; without any, 0 is the lowest.
PositiveInt = Annotated[int, 1, 10**15]
PositiveFloat = Annotated[float, 1e-30, 1e300]


class UserError(Exception):
    """A mistake of the user: one line that names the problem and what would work."""


@dataclass
class RunConfig:
    """Where a run writes, and its seed."""

    dir: str = "runs/default"
    """Directory that the run writes to, created if missing. The same command resumes the run."""
    seed: Annotated[int, 0, 2**63 - 1] = 0
    """Seed of the initial weights, the order of the data and its augmentation."""


@dataclass
class DataConfig:
    """How samples are grouped into batches."""

    global_batch_size: PositiveInt = 64
    """Number of samples per optimizer step, over all ranks together."""
    micro_batch_size: PositiveInt | None = None
    """Number of samples per forward pass of training; null: the local batch of the first start."""
    num_microbatches = 1  # This is no setting: divide_batch() sets how many a global batch has.
    eval_batch_size: PositiveInt = 256
    """Number of samples per forward pass of evaluation; a rank takes whole batches, in turn."""
    num_workers: Annotated[int, 0, 1024] = 0
    """Number of loader processes per rank; 0 loads samples in the rank's own process."""


#:: include "task/" ~ cookiecutter.task ~ "/config.py" ::#


#:: include "parallelism/" ~ cookiecutter.parallelism ~ "/config.py" ::#


@dataclass
class OptimConfig:
    """AdamW with linear warm-up and cosine decay."""

    lr: PositiveFloat = 1e-3
    """Peak learning rate."""
    min_lr_ratio: float = 0.0
    """Learning rate at the last step of ``train.epochs``, as a fraction of the peak."""
    warmup_steps: int = 0
    """Number of steps over which the learning rate rises from zero to its peak."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices and kernels; biases and norms have none."""
    betas: Annotated[tuple[float, float], 0, 0.99999] = (0.9, 0.99)
    """Decay rates of AdamW's first and second moment estimates."""
    eps: float = 1e-8
    """Term that AdamW adds to the denominator for numerical stability."""


@dataclass
class TrainConfig:
    """The training loop."""

    epochs: PositiveInt = 1
    """Number of passes over the training set."""
    max_steps: PositiveInt | None = None
    """Stop after this many steps; the schedule does not change, so that a later run can resume."""
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """Precision of forward and backward. Weights stay in fp32; fp64 has all, to compare on CPUs."""
    exact: bool = True
    """The same bits in each run: deterministic algorithms, full fp32, one order of sums."""
    compile: bool = False
    """Compile each block of the model, and the losses, with torch.compile."""
    activation_checkpointing: bool = False
    """Keep only each block's input, and recompute the rest: less memory, more computation."""
    allow_unused: bool = False
    """Accept parameters that the loss of some or all micro-batches does not depend on."""
    clip_grad_norm: PositiveFloat | None = None
    """Maximum norm of the gradient over all parameters; null turns clipping off."""
    log_every: PositiveInt = 10
    """Number of steps between two records. The loop waits for the device only when it logs."""
    eval_every: PositiveInt | None = None
    """Number of steps between two evaluations, each after a checkpoint; null: only at the end."""
    profile: bool = False
    """Write a trace of steps 11 to 15 of each rank to run.dir, for https://ui.perfetto.dev."""


@dataclass
class CheckpointConfig:
    """What a run saves, and what it resumes from."""

    every_steps: PositiveInt | None = None
    """Number of steps between two checkpoints; null saves only before an evaluation."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep, in addition to the best one."""
    resume: str = "auto"
    """auto: resume if run.dir has a checkpoint. never: reject such a run.dir. PATH: start there."""
    #:: if fact("shards") ::#
    format: Literal["full", "sharded"] = "full"
    """full: rank 0 writes one file. sharded: each rank writes its part while training continues."""
    #:: endif ::#


@dataclass
class DistributedConfig:
    """The process group."""

    device: Literal["auto", "cpu"] = "auto"
    """auto: an accelerator for each rank if the machine has any, otherwise the CPU."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Communication backend. auto: that of the device, NCCL for NVIDIA GPUs, gloo for CPUs."""
    init_method: str = "env://"
    """How ranks meet: env:// (the launcher's variables), tcp://HOST:PORT or file:///PATH."""
    timeout_seconds: Annotated[float, 1e-30, 1e9] = 600.0
    """Longest time in seconds to wait for other ranks; then the run ends with an error."""


@dataclass
class Config:
    """All settings of a run, one section per concern."""

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    def files(self) -> dict[str, str]:
        """Return the paths of settings with ``metadata={"file": True}``, by the setting's name."""
        paths = {}
        for section, settings in vars(self).items():
            for setting in fields(settings):
                path = getattr(settings, setting.name)
                if "file" in setting.metadata and path:
                    paths[f"{section}.{setting.name}"] = path
        return paths

    def check(self, world_size: int, trains: bool) -> None:
        """Reject values that cannot work on ``world_size`` ranks, in training or otherwise."""
        for section, settings in vars(self).items():
            for setting in fields(settings):
                value = getattr(settings, setting.name)
                check_value(f"{section}.{setting.name}", value, setting.type)
        paths = self.files()
        if not trains:
            # A checkpoint has the weights; the file that they started from may be gone.
            paths.pop("model.weights", None)
        if self.checkpoint.resume not in ("auto", "never"):
            paths["checkpoint.resume"] = self.checkpoint.resume
        for name, path in paths.items():
            if not Path(path).exists():
                raise UserError(f"{name} is {path}: no such file")
        for settings in vars(self).values():
            if hasattr(settings, "check"):
                settings.check(self, world_size)
        divisor = self.parallel.dp_size(world_size) * (self.data.micro_batch_size or 1)
        if trains and self.data.global_batch_size % divisor:
            raise UserError(
                f"data.global_batch_size is {self.data.global_batch_size}; "
                f"{divisor} (local batches x data.micro_batch_size) must divide it"
            )

    def divide_batch(self, content: Any, world_size: int) -> None:
        """Set the number of micro-batches and, if null, their size, which a checkpoint may have."""
        saved = content.get("config") or asdict(self)
        local_batch_size = self.data.global_batch_size // self.parallel.dp_size(world_size)
        # Checkpoints of version 1 have the number of a rank's micro-batches instead.
        first_size = local_batch_size // saved["train"].get("microbatches", 1)
        size = self.data.micro_batch_size or saved["data"].get("micro_batch_size") or first_size
        # On more ranks, a local batch may be smaller than a micro-batch of the first start.
        self.data.micro_batch_size = math.gcd(size, local_batch_size)
        self.data.num_microbatches = self.data.global_batch_size // self.data.micro_batch_size


def check_value(name: str, value: Any, hint: Any) -> None:
    """Reject an empty text, and numbers outside of the bounds of their type."""
    if value == "":
        raise UserError(f"{name} is {value!r}; give a text")
    bounds = (0, 1e300)
    for part in (hint, *get_args(hint)):
        bounds = getattr(part, "__metadata__", bounds)  # PositiveInt | None has two parts.
    low, high = bounds
    for number in value if isinstance(value, tuple) else [value]:
        # Not isinstance(): a bool is an int, too. NaN is rejected: no comparison with it is true.
        if type(number) in (int, float) and not low <= number <= high:
            raise UserError(f"{name} is {number!r}; give a number from {low:g} to {high:g}")
