"""Settings: typed dataclasses with one docstring per field, which ``--help`` shows. Imports no PyTorch."""

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from jsonargparse import set_parsing_settings

set_parsing_settings(docstring_parse_attribute_docstrings=True, unset_sentinel=True)  # Then null is a value.


class UserError(Exception):
    """Something that the user has to change: one line that names the problem and what would work."""


@dataclass
class RunConfig:
    """Where the run writes, and what makes it reproducible."""

    dir: str = "runs/default"
    """Directory for everything that the run writes; created if missing. The same command resumes the run there."""
    seed: int = 0
    """Seed of the initial weights, the order of the data and its augmentation."""


@dataclass
class DataConfig:
    """How samples are grouped into batches."""

    global_batch_size: int = 64
    """Samples per optimizer step, over all ranks together."""
    eval_batch_size: int = 256
    """Samples per forward pass of evaluation, on each rank."""
    num_workers: int = 0
    """Loader processes per rank; 0 loads in the rank's own process."""


#:: include "task/" ~ cookiecutter.task ~ "/config.py" ::#


#:: include "parallelism/" ~ cookiecutter.parallelism ~ "/config.py" ::#


@dataclass
class OptimConfig:
    """AdamW with linear warm-up and cosine decay."""

    lr: float = 1e-3
    """Peak learning rate."""
    min_lr_ratio: float = 0.0
    """Learning rate of the last step of ``train.epochs``, as a fraction of the peak."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises from zero to its peak."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices and kernels; biases and normalization weights have none."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])
    """Decay rates of AdamW's first and second moments."""
    eps: float = 1e-8
    """Term that AdamW adds to the denominator."""


@dataclass
class TrainConfig:
    """The training loop."""

    epochs: int = 1
    """Passes over the training set."""
    max_steps: int | None = None
    """Stop after this many optimizer steps; the schedule keeps its length, so a later run can resume from there."""
    microbatches: int = 1
    """Micro-batches that a rank splits its local batch into, to save memory; the result stays the same."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of forward and backward; weights stay in fp32, and fp16 scales the loss."""
    exact: bool = True
    """Deterministic algorithms alone, and on GPUs full fp32 instead of TF32. Turn it off for speed."""
    compile: bool = False
    """Compile each block of the model, and the losses, with torch.compile."""
    activation_checkpointing: bool = False
    """Keep only the input of each block for backward and recompute the rest: less memory, a third more computation."""
    allow_unused: bool = False
    """Accept parameters that the loss does not depend on, which are an error otherwise."""
    clip_grad_norm: float | None = None
    """Maximum norm of the whole gradient; null turns clipping off."""
    log_every: int = 10
    """Steps between two records; the loop waits for the device only then."""
    eval_every: int | None = None
    """Steps between two evaluations, each after a checkpoint of that step; null evaluates only at the end."""
    profile: bool = False
    """Write each rank's trace of steps 11 to 15 of this start to run.dir, for https://ui.perfetto.dev."""


@dataclass
class CheckpointConfig:
    """What a run saves, and what it resumes from."""

    every_steps: int | None = None
    """Steps between two checkpoints; null saves only before an evaluation."""
    keep: int = 2
    """Number of newest checkpoints to keep, in addition to the best one."""
    resume: str = "auto"
    """auto: resume if run.dir holds a checkpoint. never: reject such a run.dir. Or a checkpoint to start from."""
    #:: if fact("shards") ::#
    format: Literal["full", "sharded"] = "full"
    """full: one file, which rank 0 assembles and writes. sharded: a folder; each rank writes its part meanwhile."""
    #:: endif ::#


@dataclass
class DistributedConfig:
    """The process group."""

    device: Literal["auto", "cpu"] = "auto"
    """auto: an accelerator for each rank if the machine has any, else the CPU."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Communication backend; auto is PyTorch's default for the device: NCCL on NVIDIA GPUs, gloo on CPUs."""
    init_method: str = "env://"
    """Rendezvous of the ranks: env:// (the launcher's variables), tcp://HOST:PORT or file:///PATH."""
    timeout_seconds: float = 600.0
    """Longest wait for other ranks, after which the run ends with an error."""


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
        """Return the values of settings that are files, by name: those with ``metadata={"file": True}``."""
        every = [(section, part, one) for section, part in vars(self).items() for one in fields(part)]
        files = {f"{name}.{one.name}": getattr(part, one.name) for name, part, one in every if "file" in one.metadata}
        return {name: path for name, path in files.items() if path is not None}

    def check(self, world_size: int, trains: bool) -> None:
        """Reject values that cannot work; numbers are positive, or zero where that is the default."""
        for section, settings in vars(self).items():
            for name, value in vars(settings).items():
                cap = {"num_workers": 1024, "timeout_seconds": 1e9}.get(name, 2**63 if type(value) is int else math.inf)
                is_zero_by_default = value == 0 and getattr(type(settings), name) == 0
                if value == "" or (type(value) in (int, float) and not (0 < value < cap or is_zero_by_default)):
                    wanted = "text" if value == "" else f"number > 0 and < {cap:g}"
                    raise UserError(f"{section}.{name} is {value!r}; give a {wanted}")
        for name, path in {**self.files(), "checkpoint.resume": self.checkpoint.resume}.items():
            if path not in ("auto", "never") and not Path(path).exists() and (trains or name != "model.weights"):
                raise UserError(f"{name} is {path}: no such file")
        if len(self.optim.betas) != 2 or not all(0 <= beta < 1 for beta in self.optim.betas):
            raise UserError(f"optim.betas is {self.optim.betas}; give two numbers from 0 to below 1")
        for check in [part.check for part in vars(self).values() if hasattr(part, "check")]:
            check(self, world_size)
        batch, dp_size = self.data.global_batch_size, self.parallel.dp_size(world_size)
        if trains and batch % (unit := dp_size * self.train.microbatches):
            raise UserError(f"data.global_batch_size is {batch}; {unit} (local batches x micro-batches) must divide it")
