"""Faults, each with the test that has to catch it.

A fault replaces a piece of one file, which has to occur there once. A fault of a project is planted in a rendered
project, whose own test has to fail; a fault of the template is planted in a copy of the template.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """A fault: ``old`` becomes ``new`` in a file, and ``test`` (a file, and words of a test's name) has to fail."""

    file: str
    old: str
    new: str
    test: str
    answers: dict[str, Any] = field(default_factory=dict)


SRC = "src/my_experiment/"
FSDP, TENSOR, PIPELINE, MODEL = ({"parallelism": name} for name in ("fsdp", "tensor", "pipeline", "model_parallel"))
LANGUAGE, CONTROL = {"task": "language"}, {"task": "control"}

# Caught by the tests of a rendered project.
PROJECT = {
    # The step
    "the gradient is not clipped": Mutant(
        SRC + "strategy.py",
        "nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)",
        "nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None])",
        "test_split.py",
    ),
    "the gradient is not reset": Mutant(SRC + "train.py", "        self.optimizer.zero_grad()\n", "", "test_split.py"),
    "the schedule does not move": Mutant(SRC + "train.py", "        self.scheduler.step()\n", "", "test_split.py"),
    "the rate is logged after the step": Mutant(
        SRC + "train.py",
        "self.log(losses, norm, lr)",
        "self.log(losses, norm, self.scheduler.get_last_lr()[0])",
        "test_split.py",
    ),
    "the loss is logged for one rank": Mutant(
        SRC + "train.py", "        dist.all_reduce(values)\n", "", "test_split.py"
    ),
    "micro-batches are not averaged": Mutant(
        SRC + "splitting/losses.py", "total = weight * self.microbatches", "total = weight", "test_split.py"
    ),
    "gradients are averaged over ranks": Mutant(SRC + "parallel.py", "loss * self.dp_size", "loss", "test_split.py"),
    # The optimizer
    "biases decay": Mutant(SRC + "optim.py", '{"weight_decay": 0.0}]', "decay]", "test_split.py"),
    "nothing decays": Mutant(
        SRC + "optim.py", '{"weight_decay": config.weight_decay}', '{"weight_decay": 0.0}', "test_split.py"
    ),
    "no warm-up": Mutant(SRC + "optim.py", "if step < config.warmup_steps:", "if False:", "test_split.py"),
    "the rate decays to zero": Mutant(
        SRC + "optim.py", "return config.min_lr_ratio + (1 - config.min_lr_ratio) *", "return", "test_split.py"
    ),
    "optim.decay_steps is ignored": Mutant(
        SRC + "optim.py", "end = config.decay_steps or planned_steps", "end = planned_steps", "test_split.py"
    ),
    "optim.betas is ignored": Mutant(SRC + "optim.py", "betas=config.betas, ", "", "test_split.py"),
    "optim.eps is ignored": Mutant(SRC + "optim.py", "eps=config.eps, ", "eps=1e-3, ", "test_split.py"),
    # The data
    "every epoch has the first one's order": Mutant(
        SRC + "train.py", "set_epoch(progress.epoch, start", "set_epoch(0, start", "test_split.py"
    ),
    "run.seed does not order the data": Mutant(
        SRC + "data.py", "manual_seed(self.seed + self.epoch)", "manual_seed(self.epoch)", "test_split.py"
    ),
    "ranks read the same samples": Mutant(
        SRC + "data.py", "[self.rank :: self.num_replicas]", "[:: self.num_replicas]", "test_data.py"
    ),
    "the incomplete batch is read": Mutant(
        SRC + "data.py", "length - (length - start) % self.global_batch_size", "length", "test_data.py"
    ),
    "random transforms repeat in every epoch": Mutant(
        SRC + "splitting/seeding.py",
        "seed_generators(self.seed, epoch, index)",
        "seed_generators(self.seed, index)",
        "test_split.py",
    ),
    "loading draws from the rank's generators": Mutant(
        SRC + "splitting/seeding.py", "        random.setstate(python)\n", "", "test_data.py"
    ),
    "random collation is not seeded": Mutant(
        SRC + "splitting/seeding.py", "            seed_generators(self.seed, *keys[0], COLLATE)\n", "", "test_data.py"
    ),
    "a stream repeats after a resume": Mutant(
        SRC + "splitting/streams.py", "len(sizes) + number", "number", "test_data.py"
    ),
    "shards repeat after a resume": Mutant(
        SRC + "splitting/streams.py", "len(range(turn, done, count))", "0", "test_data.py"
    ),
    # Evaluation
    "dropout acts in evaluation": Mutant(
        SRC + "evaluate.py", "        self.parallel.module.eval()\n", "", "test_training.py"
    ),
    "training goes on in evaluation mode": Mutant(
        SRC + "evaluate.py", "        self.parallel.module.train()\n", "", "test_training.py"
    ),
    "each rank counts every sample": Mutant(
        SRC + "data.py", "range(dp_rank, length, dp_size)", "range(0, length)", "test_data.py"
    ),
    "the worst checkpoint is the best": Mutant(
        SRC + "train.py", "sign * value > sign * progress", "sign * value < sign * progress", "test_training.py"
    ),
    # Experience
    "environments are seeded by their place on the rank": Mutant(
        SRC + "splitting/environments.py",
        "keys = zip(self.numbers, self.episodes, strict=True)",
        "keys = enumerate(self.episodes)",
        "test_dataset.py",
        CONTROL,
    ),
    "actions are drawn alike in every collection": Mutant(
        SRC + "splitting/experience.py", '"action", number, rollout)', '"action", number, 0)', "test_split.py", CONTROL
    ),
    "advantages are normalized by each rank": Mutant(
        SRC + "splitting/experience.py",
        "sum(self.gather(torch.stack(sums)).values())",
        "torch.stack(sums) * self.strategy.dp_size",
        "test_split.py",
        CONTROL,
    ),
    "an episode that is cut off ends": Mutant(
        SRC + "splitting/experience.py",
        "following_values, terminated, ended, self.control",
        "following_values, ended, ended, self.control",
        "test_dataset.py",
        CONTROL,
    ),
    "a resumed environment starts its episode anew": Mutant(
        SRC + "splitting/environments.py",
        "            for action in actions:",
        "            for action in []:",
        "test_dataset.py",
        CONTROL,
    ),
    "each rank plays every episode": Mutant(
        SRC + "evaluate.py",
        "own, size = range(self.parallel.dp_rank, ",
        "own, size = range(0, ",
        "test_evaluate.py",
        CONTROL,
    ),
    # Settings
    "train.precision is ignored": Mutant(
        SRC + "strategy.py", "[config.train.precision]", '["fp32"]', "test_training.py"
    ),
    "train.compile is ignored": Mutant(
        SRC + "splitting/blocks.py", "if config.compile:", "if False:", "test_training.py"
    ),
    "train.activation_checkpointing is ignored": Mutant(
        SRC + "splitting/blocks.py", "if config.activation_checkpointing:", "if False:", "test_training.py"
    ),
    "train.log_every is ignored": Mutant(
        SRC + "train.py", "if is_last or is_due(progress.step, config.train.log_every):", "if True:", "test_training.py"
    ),
    "train.eval_every is ignored": Mutant(
        SRC + "train.py", " or is_due(progress.step, self.config.train.eval_every)", "", "test_training.py"
    ),
    "distributed.timeout_seconds is ignored": Mutant(
        SRC + "train.py",
        "        runtime.set_timeout(self.config.distributed.timeout_seconds)\n",
        "",
        "test_training.py",
    ),
    # Checkpoints
    "random state is not restored": Mutant(
        SRC + "checkpoint/checkpointer.py",
        '        set_rng_state(own[0]["rng"], self.process.device)\n',
        "",
        "test_training.py",
    ),
    "all ranks have the same random numbers": Mutant(
        SRC + "train.py",
        "seed_rank(config.run.seed, process.rank)",
        "seed_rank(config.run.seed, 0)",
        "test_training.py",
    ),
    "one checkpoint too many is kept": Mutant(
        SRC + "checkpoint/checkpointer.py", "(run_dir)[:-keep]", "(run_dir)[: -keep - 1]", "test_training.py"
    ),
    "the best checkpoint is removed": Mutant(
        SRC + "checkpoint/checkpointer.py", "if path.stem != ", 'if "" != ', "test_training.py"
    ),
    "checkpoints are written in place": Mutant(
        SRC + "runtime/files.py", 'temporary = path.with_suffix(".tmp")', "temporary = path", "test_training.py"
    ),
    "the position in the epoch is not restored": Mutant(
        SRC + "train.py", "start=progress.samples)", "start=0)", "test_resume.py"
    ),
    "the schedule is not saved": Mutant(
        SRC + "train.py", '        register("scheduler", self.scheduler)\n', "", "test_resume.py"
    ),
    "the optimizer is not saved": Mutant(
        SRC + "checkpoint/state_dict.py",
        "    for optimizer in optimizers:\n        # This",
        "    for optimizer in ():\n        # This",
        "test_resume.py",
    ),
    "records of lost steps stay": Mutant(
        SRC + "reporting/metrics.py", 'if record["step"] <= step]', "]", "test_resume.py"
    ),
    "a stop needs a signal on every rank": Mutant(
        SRC + "runtime/stop_signal.py", "dist.ReduceOp.MAX", "dist.ReduceOp.MIN", "test_resume.py"
    ),
    "checksums are not verified": Mutant(
        SRC + "checkpoint/sharded.py", "if self.checksums.get(key) != checksum:", "if False:", "test_checkpoint.py"
    ),
    "loading runs code": Mutant(
        SRC + "checkpoint/loading.py",
        "weights_only=True, mmap=True)",
        "weights_only=False, mmap=True)",
        "test_checkpoint.py",
    ),
    # Other strategies and tasks
    "fsdp: gradients are averaged": Mutant(SRC + "parallel.py", "loss * self.dp_size", "loss", "test_split.py", FSDP),
    "tensor: replicas have their own gradients": Mutant(
        SRC + "parallel.py", "if self.dp_size > 1:", "if False:", "test_split.py", TENSOR
    ),
    "pipeline: pipelines have their own gradients": Mutant(
        SRC + "parallel.py",
        "        if self.dp_size > 1:  # Each",
        "        if False:  # Each",
        "test_split.py",
        PIPELINE,
    ),
    "pipeline: each stage clips for itself": Mutant(
        SRC + "parallel.py", "        dist.all_reduce(squared, group=self.pipeline)\n", "", "test_split.py", PIPELINE
    ),
    "model_parallel: gradients are averaged": Mutant(
        SRC + "parallel.py", "loss * self.dp_size", "loss", "test_split.py", MODEL
    ),
    "language: a byte predicts itself": Mutant(
        SRC + "dataset.py", "window[:-1], window[1:]", "window[:-1], window[:-1]", "test_dataset.py", LANGUAGE
    ),
    "language: the temperature is ignored": Mutant(
        SRC + "generate.py", ".cpu() / temperature)", ".cpu())", "test_generate.py", LANGUAGE
    ),
    # Launchers
    "the local rank is the rank": Mutant(
        SRC + "launch/environment.py",
        'int(env["SLURM_LOCALID"])',
        'int(env["SLURM_PROCID"]) + 1',
        "test_environment.py",
    ),
    "the shipped experiment is not the default": Mutant(
        "configs/default.yaml", "max_shift: 1", "max_shift: 2", "test_settings.py"
    ),
    "the launcher hides a failure": Mutant(
        "scripts/launch.sh", 'exec "$PYTHON" -m torch', '! "$PYTHON" -m torch', "test_settings.py"
    ),
}

# Caught by the template's own tests.
TEMPLATE = {
    "a slug may be a module's name": Mutant(
        "cookiecutter.json", '"torch", ', "", "test_answers.py::test_no_slug_is_the_name"
    ),
    "a slug may lead out of the folder": Mutant(
        "hooks/pre_gen_project.py", "([-_][", "([-_./][", "test_answers.py::rejected"
    ),
    "make demo expands a dollar sign": Mutant("Makefile", "$(value $(q))", "$($(q))", "test_answers.py::make_demo"),
    "a choice leaves a trace": Mutant(
        "templates/parallelism/tensor/README.md",
        "## What one step does",
        "## What one step of the pipeline does",
        "test_render.py::traces",
    ),
    "a branch is never taken": Mutant(
        "{{cookiecutter.project_slug}}/.gitignore", '== "slurm"', '== "slrum"', "test_render.py::branch"
    ),
    "a workflow keeps credentials": Mutant(
        "{{cookiecutter.project_slug}}/.github/workflows/test.yml",
        "persist-credentials: false",
        "fetch-depth: 1",
        "test_render.py::workflow",
    ),
    "a link leads nowhere": Mutant(
        "{{cookiecutter.project_slug}}/README.md", "(docs/ema.md)", "(docs/emas.md)", "test_render.py::markdown"
    ),
    "a command is misspelt": Mutant(
        "{{cookiecutter.project_slug}}/README.md",
        "launch.sh convert --checkpoint",
        "launch.sh convert --checkpont",
        "test_documents.py::launch",
    ),
    "data.eval_batch_size is ignored": Mutant(
        "{{cookiecutter.project_slug}}/src/{{cookiecutter.__package}}/evaluate.py",
        "self.sampler, config.eval_batch_size,",
        "self.sampler, 256,",
        "test_effects.py::ddp",
    ),
    "nothing shows what a setting does": Mutant(
        "{{cookiecutter.project_slug}}/src/{{cookiecutter.__package}}/config.py",
        "    seed: NonNegativeInt = 0\n",
        "    new: int = 0\n    seed: NonNegativeInt = 0\n",
        "test_effects.py::ddp",
    ),
    "a room imports upwards": Mutant(
        "{{cookiecutter.project_slug}}/src/{{cookiecutter.__package}}/runtime/files.py",
        "import os\n",
        "import os\n\nfrom ..train import train\n",
        "test_architecture.py",
    ),
}
