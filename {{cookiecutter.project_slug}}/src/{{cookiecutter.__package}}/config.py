"""Settings: typed dataclasses with one docstring per field, which ``--help`` shows.

This module imports neither PyTorch nor the rest of the package: wrong settings are reported before any process starts.
"""

#:: include "task/" ~ cookiecutter.task ~ "/config_imports.py" ignore missing ::#
from dataclasses import dataclass, field
from typing import Literal, get_type_hints

from jsonargparse import set_parsing_settings
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

set_parsing_settings(docstring_parse_attribute_docstrings=True)


class UserError(Exception):
    """Something that the user has to change: one line that states the problem and what would work.

    A function that "rejects" something raises it. It ends the process with exit code 2, before anything is lost.
    """


@dataclass
class RunConfig:
    """Where the run writes, and what makes it reproducible."""

    dir: str = "runs/default"
    """Directory for everything that the run writes; created if missing. If you set it for evaluate, the record is also
    appended to metrics.jsonl there; otherwise it is only printed."""
    seed: NonNegativeInt = 0
    #:: if cookiecutter.__plays ::#
    """Seed of the initial weights, of every episode and of the actions in it, and of the order of the samples."""
    #:: else ::#
    """Seed of the initial weights, the order of the data and its augmentation."""
    #:: endif ::#


@dataclass
class DataConfig:
    """How samples are grouped into batches, whatever they contain."""

    #:: if cookiecutter.task == "digits" ::#
    global_batch_size: PositiveInt = 64
    #:: elif cookiecutter.__plays ::#
    global_batch_size: PositiveInt = 256
    #:: else ::#
    global_batch_size: PositiveInt = 32
    #:: endif ::#
    """Samples per optimizer step, over all ranks together."""
    eval_batch_size: PositiveInt = 256
    """At most this many samples per forward pass of evaluation, on each rank."""
    num_workers: NonNegativeInt = 0
    """Loader processes per rank, which training and evaluation share; 0 loads in the rank's own process."""


#:: include "task/" ~ cookiecutter.task ~ "/config.py" ::#


#:: include "parallelism/" ~ cookiecutter.parallelism ~ "/config.py" ::#


@dataclass
class OptimConfig:
    """AdamW with linear warm-up and cosine decay."""

    #:: if cookiecutter.__plays ::#
    lr: PositiveFloat = 1e-3
    #:: else ::#
    lr: PositiveFloat = 4e-3
    #:: endif ::#
    """Peak learning rate."""
    min_lr_ratio: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay, as a fraction of the peak."""
    warmup_steps: NonNegativeInt = 40
    """Steps over which the learning rate rises from zero to its peak."""
    decay_steps: PositiveInt | None = None
    """Step at which the decay ends; null is the last step of ``train.epochs``."""
    #:: if cookiecutter.__plays ::#
    weight_decay: NonNegativeFloat = 0.0
    #:: else ::#
    weight_decay: NonNegativeFloat = 0.05
    #:: endif ::#
    """Decoupled weight decay of matrices and kernels; biases and normalization weights have none."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Decay rates of AdamW's first and second moments."""
    #:: if cookiecutter.task == "digits" ::#
    eps: PositiveFloat = 1e-8
    """Term that AdamW adds to the denominator."""
    #:: elif cookiecutter.__plays ::#
    eps: PositiveFloat = 1e-4
    """Term that AdamW adds to the denominator. Many passes over the same experience leave gradients that are small sums
    of large terms; without it, full steps of their rounding errors would soon lead to another action under another
    split."""
    #:: else ::#
    eps: PositiveFloat = 1e-6
    """Term that AdamW adds to the denominator: gradients far below it, which may be only rounding errors, cause no
    full steps."""
    #:: endif ::#


@dataclass
class TrainConfig:
    """The training loop."""

    #:: if cookiecutter.task == "digits" ::#
    epochs: PositiveInt = 20
    #:: elif cookiecutter.__plays ::#
    epochs: PositiveInt = 4000
    #:: else ::#
    epochs: PositiveInt = 1
    #:: endif ::#
    #:: if cookiecutter.__plays ::#
    """Passes over experience, control.passes of them over the same."""
    #:: else ::#
    """Passes over the training set."""
    #:: endif ::#
    max_steps: PositiveInt | None = None
    """Stop after this many optimizer steps; the schedule keeps its length, so a later run can resume from there."""
    #:: if cookiecutter.__has_stages ::#
    microbatches: PositiveInt = 8
    """Micro-batches per pipeline and step, which pass through the stages one after another: the more there are, the
    less the stages wait for each other."""
    #:: else ::#
    microbatches: PositiveInt = 1
    """Micro-batches that a rank splits its share of the batch into, to save memory; the result stays the same."""
    #:: endif ::#
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of forward and backward; weights stay in fp32, and fp16 scales its loss."""
    exact: bool = True
    """On GPUs: compute in full fp32 instead of TF32, and with deterministic algorithms, attention included. Turn it off
    for speed, or for an operation that has none, if results may change in their last digits."""
    compile: bool = False
    """Compile each block of the model with torch.compile."""
    activation_checkpointing: bool = False
    """Keep only the input of each block for backward and recompute the rest: less memory, a third more computation."""
    memory_snapshot: bool = False
    """On CUDA GPUs: record what allocates memory, and write that to run.dir/memory-rank*.pickle if it runs out."""
    clip_grad_norm: PositiveFloat | None = 1.0
    """Maximum norm of the whole gradient; null turns clipping off."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What a loss or a gradient that is inf or NaN does: it never reaches the weights. stop: the run ends by the next
    log line, which names step, rank and where it can the samples or the module. skip: it goes on without the step."""
    check_replicas_every: PositiveInt | None = None
    """Steps between two checks that ranks hold the same where they should, such as copies of the weights; null checks
    never. It reads all weights and the optimizer's state."""
    log_every: PositiveInt = 10
    """Steps between two metrics records; the loop waits for the device only then."""
    #:: if cookiecutter.task == "digits" ::#
    eval_every: PositiveInt | None = 110
    #:: elif cookiecutter.__plays ::#
    eval_every: PositiveInt | None = 400
    #:: else ::#
    eval_every: PositiveInt | None = 475
    #:: endif ::#
    """Steps between two evaluations; null evaluates only at the end."""


@dataclass
class CheckpointConfig:
    """What a run saves, and what it resumes from."""

    format: Literal["full", "sharded"] = "full"
    """full: one file, which rank 0 assembles and writes. sharded: a folder, for models too large for that; each rank
    writes what it holds while training continues. A run resumes from either; convert turns one into the other."""
    #:: if cookiecutter.task == "digits" ::#
    every_steps: PositiveInt | None = 110
    #:: elif cookiecutter.__plays ::#
    every_steps: PositiveInt | None = 400
    #:: else ::#
    every_steps: PositiveInt | None = 475
    #:: endif ::#
    """Steps between two checkpoints; null saves only at the end and when the model is the best so far."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep, in addition to the best one."""
    timeout_seconds: PositiveFloat = 3600.0
    """Longest wait of the other ranks while one writes a checkpoint."""
    resume: str = "auto"
    """auto: resume if run.dir holds a checkpoint. never: reject a run.dir with one. Or the path of a checkpoint."""


@dataclass
class DistributedConfig:
    """The process group."""

    backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"
    """Communication backend; auto is the device's default (NCCL on NVIDIA GPUs, gloo on CPUs)."""
    device: Literal["auto", "cpu"] = "auto"
    """auto: an accelerator for each process if the machine has any, else the CPU."""
    init_method: str = "env://"
    """Rendezvous of the ranks: env:// (set by the launcher), tcp://host:port or file:///path."""
    timeout_seconds: PositiveFloat = 120.0
    """Longest wait for other ranks from the second step on, after which the run ends with an error."""
    startup_timeout_seconds: PositiveFloat = 1800.0
    """The same until the first step is done, while ranks load data, compile and warm up."""
    agree_seconds: NonNegativeFloat = 0.5
    """Time between two messages by which ranks learn that one of them is to stop; at most one is sent for a step."""


@dataclass
class Config:
    """All settings of a run, one section per concern."""

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    #:: if cookiecutter.__plays ::#
    control: ControlConfig = field(default_factory=ControlConfig)
    #:: else ::#
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    #:: endif ::#
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    #:: if cookiecutter.__generates ::#
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    #:: endif ::#
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    def check(self) -> None:
        """Reject values that have the right type but cannot work."""
        if self.run.seed >= 2**32:
            raise UserError(f"run.seed is {self.run.seed}; give a number below 2**32")
        if not all(0 <= beta < 1 for beta in self.optim.betas):
            raise UserError(f"optim.betas is {list(self.optim.betas)}; give two numbers from 0 to below 1")
        if self.model.weights is not None and self.checkpoint.resume not in ("auto", "never"):
            raise UserError("model.weights starts a new run and checkpoint.resume continues one; give one of them")
        #:: if cookiecutter.__plays ::#
        self.control.check()
        #:: else ::#
        self.dataset.check()
        #:: endif ::#
        self.model.check()


def sections() -> dict[str, type]:
    """Return the class of each section of ``Config``, by name."""
    return get_type_hints(Config)
