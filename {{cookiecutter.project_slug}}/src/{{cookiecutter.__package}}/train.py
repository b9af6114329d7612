"""The training loop: forward, backward, clip, step; then log, save and evaluate when it is due."""

import math
import time
from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import Any

import torch

from .config import Config, UserError
from .distributed import Process, StopSignal, derive_seed, seed_everything
from .evaluate import Evaluator
from .experiment import build_experiment
from .loader import TrainSampler, build_loader, to_device
from .logger import Logger, profile_steps
from .losses import MeanLosses, StepLosses
from .optim import build_optimizer, set_learning_rate
from .parallel import Parallel


class Trainer:
    """A run on one rank, which resumes from its newest checkpoint if there is one."""

    def __init__(self, config: Config, process: Process) -> None:
        self.config = config
        self.process = process
        self.stop_signal = StopSignal(process)
        # The run directory is locked, and its newest checkpoint read, before the model is built.
        self.checkpointer = Parallel.checkpointer(config, process)
        config.divide_batch(self.checkpointer.initial_content, process.world_size)
        self.task, self.parallel, datasets = build_experiment(config, process)
        train_set, validation_set, _ = datasets
        self.sampler = TrainSampler(len(train_set), self.parallel.microbatches, config)
        self.loader = build_loader(train_set, self.sampler, config, process.device)
        self.losses = MeanLosses(self.task, self.parallel, config.data.num_microbatches)
        self.evaluator = Evaluator(self.task, self.parallel, validation_set, config)
        # The schedule is as long as all epochs, so that a run that max_steps ended can resume.
        self.scheduled_steps = config.train.epochs * self.sampler.steps_per_epoch
        self.total_steps = min(self.scheduled_steps, config.train.max_steps or self.scheduled_steps)
        module = self.parallel.module
        self.optimizer = build_optimizer(module, config.optim)
        self.step, changes = self.checkpointer.restore(
            self.parallel, self.optimizer, [*map(len, datasets)]
        )
        self.logger = Logger(config, process, self.step, self.total_steps, changes)
        if config.train.exact:
            if "SyncBatchNorm" in str(module):
                raise UserError("SyncBatchNorm adds up in any order; turn train.exact off")
            #:: if fact("loop") ::#
            # A rank's environments act as one batch, whose size may decide how kernels round.
            self.logger.print("the last bits depend on the number of ranks: see the README")
            #:: else ::#
            if not self.parallel.matches_one_rank or "running_mean" in str([*module.state_dict()]):
                self.logger.print("the last bits depend on the number of ranks: see the README")
            #:: endif ::#

    def run(self) -> bool:
        """Train to the last step, or until a stop signal; returns whether one stopped the run."""
        self.evaluate_if_missing()
        stopped = False
        self.start_period()
        with profile_steps(self.config, self.process) as profiler:
            for batch in self.batches():
                self.unlogged_steps.append(self.train_step(batch))
                self.step += 1
                if profiler:
                    profiler.step()
                evaluation_is_due = self.is_due(self.config.train.eval_every)
                save_is_due = evaluation_is_due or self.is_due(self.config.checkpoint.every_steps)
                log_is_due = save_is_due or self.is_due(self.config.train.log_every)
                # If a rank hangs, this times out and names it, before log() waits for it.
                stopped = self.stop_signal.agreed(must_check=log_is_due)
                if log_is_due or stopped:
                    self.log()
                # The run saves before it evaluates, because an evaluation may take long.
                if save_is_due or stopped:
                    self.save()
                if stopped:
                    break
                if evaluation_is_due:
                    self.evaluate()
                if save_is_due:
                    self.checkpointer.prune(self.logger.best_steps(self.task))
                if log_is_due:
                    self.start_period()
        # A thread was perhaps still writing the last checkpoint when the loop called prune().
        self.checkpointer.wait_for_writers(raises=True)
        self.checkpointer.prune(self.logger.best_steps(self.task))
        if stopped:
            self.logger.print(f"stopped after step {self.step}; the same command resumes it")
        #:: if file("tracker", "tracker.py") ::#
        self.logger.close()
        #:: endif ::#
        return stopped

    #:: if fact("loop") ::#
    #:: filter indent(4, true) ::#
    #:: include "task/" ~ cookiecutter.task ~ "/step.py" ::#
    #:: endfilter ::#

    def update(self, microbatches: list[Any], purpose: str) -> StepLosses:
        """Take one optimizer step; returns its losses and gradient norm, still on the device."""
    #:: else ::#
    def train_step(self, batch: Iterable[Any]) -> StepLosses:
        """Take one step with micro-batches; returns its losses and gradient norm, on the device."""
        microbatches = []
        for microbatch in self.seeded("prepare", batch):
            inputs, targets = to_device(microbatch, self.process.device)
            inputs, targets = self.task.augment(inputs, targets)
            microbatches.append(self.task.prepare(inputs, targets))
    #:: endif ::#
        # The weight of the global batch is known only when all of its targets are prepared.
        self.losses.set_weight(microbatches)
        #:: if fact("loop") ::#
        if not self.unlogged_steps:
            # Earlier updates of this step have changed the weights.
            self.state_before = self.sum_bits()
        self.parallel.forward_backward(self.seeded(purpose, microbatches), self.losses.mean_loss)
        #:: else ::#
        self.parallel.forward_backward(self.seeded("forward", microbatches), self.losses.mean_loss)
        #:: endif ::#
        if not self.unlogged_steps:
            self.state_after = self.sum_bits()
        self.check_gradients()
        set_learning_rate(self.optimizer, self.step, self.scheduled_steps, self.config.optim)
        # An optimizer that draws, such as SGLD, has to draw the same numbers on all ranks.
        seed_everything(self.step, self.process.device)
        # Under fp16, gradients are scaled until they are clipped; else this is optimizer.step().
        scaler = self.parallel.scaler
        scaler.unscale_(self.optimizer)
        grad_norm = self.parallel.clip_grad_norm(self.config.train.clip_grad_norm or math.inf)
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad()
        return [{**part, "grad_norm": grad_norm} for part in self.losses.parts]

    def seeded(self, purpose: str, microbatches: Iterable[Any]) -> Iterator[Any]:
        """Yield micro-batches, and seed random numbers by the number of each, not by the rank."""
        for number, microbatch in zip(self.parallel.microbatches, microbatches, strict=True):
            seed_everything(
                derive_seed(self.config.run.seed, purpose, self.step, number), self.process.device
            )
            yield microbatch

    def batches(self) -> Iterator[Any]:
        """Yield this rank's micro-batches of each step; ``run`` counts the steps that it takes."""
        while self.step < self.total_steps:
            epoch, consumed_samples = self.sampler.position(self.step)
            self.sampler.set_epoch(epoch, consumed_samples)
            # zip takes one micro-batch after the other from the same iterator.
            iterators = [iter(self.loader)] * len(self.parallel.microbatches)
            for batch in zip(*iterators, strict=True):
                yield batch
                if self.step == self.total_steps:
                    return

    def check_gradients(self) -> None:
        """Reject parameters that the loss does not depend on."""
        trained = self.checkpointer.trained_parameters
        missing = {parameter for parameter in trained if parameter.grad is None}
        if missing and not self.config.train.allow_unused:
            names = self.parallel.module.named_parameters()
            unused = [name for name, parameter in names if parameter in missing]
            raise UserError(
                f"the loss does not depend on {unused[:5]} in each micro-batch; "
                "use or freeze them, or set train.allow_unused"
            )

    def is_due(self, every: int | None) -> bool:
        """Return whether the last step, or one that ``every`` divides, has been taken."""
        return self.step == self.total_steps or (every is not None and self.step % every == 0)

    def start_period(self) -> None:
        """Start to measure the steps that the next record is about."""
        self.unlogged_steps = list[StepLosses]()
        self.state_before = self.sum_bits()
        self.period_start = time.perf_counter()

    def log(self) -> None:
        """Record the mean losses since the last record, and the last norm; waits for the device."""
        steps = self.losses.average(self.unlogged_steps)
        self.check_finite(steps)
        # With more ranks, each runs fewer micro-batches; and a resumed run builds a new task.
        for name, total in self.state_after.items():
            if total != self.state_before.get(name, total):
                raise UserError(f"micro-batches change {name}; do so at the end of train_step")
        # Under fp16, the norm of a step that the scaler skips is infinite, and so would be a mean.
        means = dict(steps[-1])
        for name in set(means) - {"grad_norm"}:
            means[name] = fmean(numbers[name] for numbers in steps)
        seconds = time.perf_counter() - self.period_start
        samples_per_second = self.config.data.global_batch_size * len(steps) / seconds
        epoch, _ = self.sampler.position(self.step)
        position = {"event": "train", "step": self.step, "epoch": epoch}
        speed = {
            "lr": self.optimizer.param_groups[0]["lr"],
            "samples_per_second": samples_per_second,
            "seconds_per_step": seconds / len(steps),
        }
        if self.process.device.type == "cuda":
            speed["peak_memory_gib"] = torch.accelerator.max_memory_allocated() / 2**30
        self.logger.log(position, means, speed, self.task.throughput(samples_per_second))

    def sum_bits(self) -> Any:
        """Return what micro-batches must not change: the task, and sums of the bits of weights."""
        sums: Any = {"Task": repr(vars(self.task))}
        modules = torch.nn.ModuleDict(
            {"model": self.parallel.module, "Task": self.task.frozen_modules}
        )
        # A state_dict would lack buffers that are not saved.
        for name, value in [*modules.named_parameters(), *modules.named_buffers()]:
            # BatchNorm's statistics are averaged before a save. parallel.py checks DTensors.
            if type(value.data) is torch.Tensor and not name.endswith(
                ("running_mean", "running_var", "num_batches_tracked")
            ):
                # A sum of another type would take memory for all numbers in that type.
                integer = getattr(torch, f"int{8 * value.itemsize}")
                # A buffer that has another shape now, such as a longer table, is another buffer.
                sums[f"{name} {[*value.shape]}"] = value.data.view(integer).sum(dtype=integer)
        return sums

    def check_finite(self, steps: list[dict[str, float]]) -> None:
        """Reject a loss or a gradient norm that is not finite."""
        scaler = self.parallel.scaler
        # The scaler skips a step that overflows, and halves its scale; below 1, that is no help.
        overflow_is_skipped = scaler.is_enabled() and scaler.get_scale() >= 1
        for step, numbers in enumerate(steps, start=self.step - len(steps) + 1):
            for name, number in numbers.items():
                if math.isfinite(number):
                    continue
                if name == "grad_norm" and overflow_is_skipped:
                    continue
                raise UserError(
                    f"step {step} has {numbers}; lower optim.lr, or look at its data and weight"
                )

    def save(self) -> None:
        """Save a checkpoint: this copies the state, and a thread writes the copy."""
        epoch, consumed_samples = self.sampler.position(self.step)
        progress = {"step": self.step, "epoch": epoch, "samples": consumed_samples}
        path = self.checkpointer.save(progress)
        self.logger.print(f"save   step {self.step}/{self.total_steps}  {path}")

    def evaluate_if_missing(self) -> None:
        """Evaluate the step that a run resumes from, if it ended before it could do so."""
        if self.step and self.is_due(self.config.train.eval_every):
            # Only rank 0 knows the records of earlier evaluations.
            if not self.process.on_main(lambda: self.step in self.logger.evaluations):
                self.evaluate()

    def evaluate(self) -> None:
        """Evaluate on the validation set."""
        # Its batches have another size, for which compiled blocks would be compiled once more.
        with torch.compiler.set_stance("force_eager"):
            metrics = self.evaluator(self.process)
        position = {"event": "eval", "step": self.step, "split": "validation"}
        self.logger.log(position, metrics)
