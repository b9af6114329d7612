"""The training loop: forward, backward, clip, step; between steps, log, save and evaluate when due."""

import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import profile, schedule
from torch.utils._pytree import tree_map

from .config import Config, UserError
from .distributed import Process, StopSignal, derive_seed, seed_everything
from .evaluate import Evaluator, build_experiment
from .loader import TrainSampler, build_loader, to_device
from .logger import Logger
from .optim import build_optimizer, learning_rate
from .parallel import Checkpointer


def train(config: Config, process: Process) -> None:
    """Train with the settings of ``config``, or resume from the newest checkpoint of ``run.dir``; a collective."""
    Trainer(config, process).run()


class Trainer:
    """One run on one rank: its model, data, optimizer and progress."""

    def __init__(self, config: Config, process: Process) -> None:
        self.config, self.process, self.stop = config, process, StopSignal(process)
        self.task, self.parallel, train_set, test_set = build_experiment(config, process)
        batch, seed, dp_size = config.data.global_batch_size, config.run.seed, self.parallel.dp_size
        self.sampler = TrainSampler(len(train_set), self.parallel.dp_rank, dp_size, batch, seed)
        self.loader = build_loader(train_set, self.sampler, batch // dp_size, config.data, process.device, seed)
        self.evaluator = Evaluator(self.task, self.parallel, test_set, config)
        self.scheduled_steps = config.train.epochs * self.sampler.steps_per_epoch
        self.total_steps = min(self.scheduled_steps, config.train.max_steps or self.scheduled_steps)
        self.optimizer = build_optimizer(self.parallel.module, config.optim)
        lengths = [len(train_set), len(test_set)]
        self.checkpointer = Checkpointer(self.parallel, self.optimizer, lengths, config, process)
        self.progress, changes = self.checkpointer.restore()
        self.saved_step = self.progress.step
        self.logger = Logger(config, process, self.progress.step, self.total_steps, changes)
        self.recent: list[tuple[dict[str, Tensor], Tensor]] = []  # Losses and gradient norms since the last record.
        self.is_first_step = True
        self.clock = time.perf_counter()

    def run(self) -> None:
        """Train to the last step, or until a stop signal; the same command resumes from there."""
        progress, stopped = self.progress, False
        was_evaluated = self.process.on_main(lambda: progress.step in self.logger.evaluations)
        if progress.step and self.evaluates() and not was_evaluated:
            self.evaluate()  # The run was ended between the checkpoint and the evaluation of this step.
        with self.profiler() as profiler:
            while progress.step < self.total_steps and not stopped:
                self.sampler.set_epoch(progress.epoch, start=progress.samples)
                for batch in self.loader:
                    self.step(*to_device(batch, self.process.device))
                    if profiler:
                        profiler.step()
                    stopped = self.finish_step()
                    if stopped or progress.step == self.total_steps:
                        break
        self.checkpointer.finish()
        if stopped:
            self.logger.print(f"stopped after step {progress.step}; the same command resumes from there")
        self.logger.close()

    def step(self, inputs: Any, targets: Any) -> None:
        """Take one optimizer step with this rank's local batch, without waiting for the device."""
        config, progress = self.config, self.progress
        seed = derive_seed(config.run.seed, "step", progress.step, self.parallel.dp_rank)  # For dropout.
        seed_everything(seed, self.process.device)
        inputs, targets = self.task.prepare(inputs, targets)
        losses = self.parallel.forward_backward(inputs, targets, self.mean_weight(targets))
        self.check_gradients()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(progress.step, self.scheduled_steps, config.optim)
        self.parallel.scaler.unscale_(self.optimizer)
        norm = self.parallel.clip_grad_norm(config.train.clip_grad_norm or math.inf)
        self.parallel.scaler.step(self.optimizer)
        self.parallel.scaler.update()
        self.optimizer.zero_grad()
        self.recent.append((losses, norm))
        progress.step += 1
        progress.samples += config.data.global_batch_size
        if progress.samples == self.sampler.end:
            progress.epoch, progress.samples = progress.epoch + 1, 0

    def mean_weight(self, targets: Any) -> int | Tensor:
        """Return what the losses of a local batch are divided by, on average over the ranks."""
        weight, samples = self.task.weight(targets), self.config.data.global_batch_size // self.parallel.dp_size
        if isinstance(weight, Tensor):
            total = weight.detach().to(self.process.device, torch.float32, copy=True)
            dist.all_reduce(total)
            return total / self.process.world_size
        no_targets = tree_map(lambda part: part[:0] if isinstance(part, Tensor) else part, targets)
        if weight % samples or (self.is_first_step and self.task.weight(no_targets)):
            raise UserError(
                f"Task.weight returns {weight} for {samples} samples; return a number only if it is proportional to "
                "the number of samples, otherwise a tensor, which is summed over the ranks"
            )
        return weight

    def check_gradients(self) -> None:
        """Reject in the first step parameters that the loss does not depend on."""
        if self.is_first_step and not self.config.train.allow_unused:
            parameters = self.parallel.module.named_parameters()
            if unused := [name for name, p in parameters if p.requires_grad and p.grad is None]:
                raise UserError(
                    f"the loss does not depend on {', '.join(unused[:5])}; use or freeze these parameters, or set "
                    "train.allow_unused"
                )
        self.is_first_step = False

    def finish_step(self) -> bool:
        """Log, save and evaluate if due; returns whether all ranks are to stop."""
        evaluates = self.evaluates()
        saves = evaluates or is_due(self.progress.step, self.config.checkpoint.every_steps)
        logs = saves or is_due(self.progress.step, self.config.train.log_every)
        stopped = self.stop.agreed(must_check=logs)
        if logs or stopped:
            self.log()
        if saves or stopped:
            self.save()  # Before the evaluation, which may take longer than a stop signal leaves.
        if evaluates and not stopped:
            self.evaluate()
        if (saves or stopped) and self.process.is_main:
            self.checkpointer.prune(self.logger.best_step(self.task.best_metric, self.task.higher_is_better))
        return stopped

    def evaluates(self) -> bool:
        """Return whether the current step is followed by an evaluation."""
        return self.progress.step == self.total_steps or is_due(self.progress.step, self.config.train.eval_every)

    def log(self) -> None:
        """Log the last step, and reject losses and gradients since the last record that are not finite.

        Only here the loop waits for the device.
        """
        values = torch.stack([torch.stack([*losses.values()]) for losses, _ in self.recent])
        dist.all_reduce(values)
        norms = torch.stack([norm for _, norm in self.recent]).tolist()
        names, losses = list(self.recent[0][0]), values.tolist()
        seconds, self.clock = time.perf_counter() - self.clock, time.perf_counter()
        step, first = self.progress.step, self.progress.step - len(losses) + 1
        scales = self.parallel.scaler.is_enabled() and self.parallel.scaler.get_scale() >= 1
        for number, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=first):
            # Under fp16, the scaler skips steps whose gradients overflow, and lowers its scale.
            if not all(map(math.isfinite, loss if scales else [*loss, norm])):
                raise UserError(
                    f"step {number} has losses of {loss} and a gradient norm of {norm}; lower optim.lr or look at the "
                    f"data, then resume from step {self.saved_step}"
                )
        record: dict[str, Any] = {"event": "train", "step": step, "epoch": self.progress.epoch}
        record |= dict(zip(names, losses[-1], strict=True))
        record |= {"lr": self.optimizer.param_groups[0]["lr"], "grad_norm": norms[-1]}
        rate = self.config.data.global_batch_size * len(losses) / seconds
        self.logger.log(record | {"samples_per_second": rate} | self.task.throughput(rate))
        self.recent = []

    def evaluate(self) -> None:
        """Evaluate on the test set."""
        record = self.evaluator(self.process)
        self.logger.log({"event": "eval", "step": self.progress.step, "split": "test", **record})
        self.clock = time.perf_counter()

    def save(self) -> None:
        """Save a checkpoint of this step, unless there is one."""
        if self.saved_step != self.progress.step:
            self.checkpointer.save(self.progress)
            self.saved_step = self.progress.step
            self.clock = time.perf_counter()

    def profiler(self) -> Any:
        """Return a profiler of five steps, or a context that does nothing."""
        if not self.config.train.profile:
            return nullcontext()
        trace = str(Path(self.config.run.dir) / f"trace-{self.process.rank}.json")
        return profile(
            schedule=schedule(skip_first=10, wait=0, warmup=0, active=5, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(trace),
        )


def is_due(step: int, every: int | None) -> bool:
    """Return whether something that is done every ``every`` steps (None: never) is due after ``step``."""
    return every is not None and step % every == 0
