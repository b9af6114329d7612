"""The training loop: forward, backward, clip, step; between steps, log, evaluate and save when due."""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from . import STARTED, dataset, runtime
from .checkpoint import Checkpointer, Progress
from .config import Config, OptimConfig
from .data import TrainSampler, build_loader
from .evaluate import Evaluator
from .launch import acquire_run_directory, is_restart
from .model import build_model
from .parallel import Parallel
from .reporting import Tracker, write_provenance
from .runtime import Process, Stopped, StopSignal, on_main, report_failures


def train(config: Config, process: Process) -> None:
    """Train with the settings of ``config``, or resume from a checkpoint of the run; a collective.

    Rejects settings that do not fit the data, the model or the run directory.
    """
    run_dir, resume = Path(config.run.dir), config.checkpoint.resume
    restarted = any(runtime.all_gather_object(is_restart()))
    candidates = on_main(lambda: acquire_run_directory(run_dir, resume, restarted))
    trainer = Trainer(config, process)
    trainer.restore(candidates)
    on_main(lambda: write_provenance(run_dir, asdict(config), process))
    trainer.run()


class Trainer:
    """One run on one rank: its model, data, optimizer and progress."""

    def __init__(self, config: Config, process: Process) -> None:
        self.config, self.process = config, process
        torch.manual_seed(config.run.seed)  # The same initial weights on every rank.
        train_set, test_set = dataset.build_datasets(config)
        self.parallel = Parallel(build_model(config.model), dataset.loss_fn, config, process)
        runtime.seed_rank(config.run.seed, process.rank)

        dp_rank, dp_size, batch = self.parallel.dp_rank, self.parallel.dp_size, config.data.global_batch_size
        self.sampler = TrainSampler(train_set, dp_rank, dp_size, batch, config.run.seed)
        self.loader = build_loader(train_set, self.sampler, batch // dp_size, config.data, process.device)
        self.stop = StopSignal()
        self.evaluator = Evaluator(test_set, self.parallel, config.data, self.stop.agree)

        planned_steps = config.train.epochs * (len(train_set) // batch)
        self.total_steps = min(planned_steps, config.train.max_steps or planned_steps)
        self.optimizer = build_optimizer(self.parallel.module, config.optim)
        self.scheduler = build_scheduler(self.optimizer, config.optim, planned_steps)
        self.scaler = torch.amp.GradScaler(process.device.type, enabled=config.train.precision == "fp16")

        run_dir, stateful = Path(config.run.dir), {"scheduler": self.scheduler, "scaler": self.scaler}
        self.checkpointer = Checkpointer(
            self.parallel.module, self.optimizer, stateful, asdict(config), run_dir, config.checkpoint, process
        )
        self.tracker = Tracker(run_dir, process.is_main, dataset.BEST_METRIC)
        self.progress = Progress()
        self.first_step = self.saved_step = 0
        self.clock, self.clock_step = 0.0, 0
        runtime.set_timeout(config.distributed.startup_timeout_seconds)

    def restore(self, candidates: Sequence[Path]) -> None:
        """Resume from the first of the ``candidates`` that can be read, if there are any."""
        self.progress = self.checkpointer.restore(candidates)
        self.first_step = self.saved_step = self.progress.step

    def run(self) -> None:
        """Train to the end; on a stop signal, save and leave the remaining steps to the next start."""
        progress, stopped = self.progress, False
        recording = self.tracker.record(progress.step, self.total_steps)
        with recording, self.checkpointer, self.stop, report_failures(lambda: f"after step {progress.step}"):
            ranks = f"{self.process.world_size} rank(s), {self.process.device.type}"
            self.tracker.print(f"{self.config.run.dir}: step {progress.step} of {self.total_steps} on {ranks}")
            self.start_clock()
            try:
                if progress.evaluation_due:
                    self.saved_step = 0  # The checkpoint of this step lacks its evaluation.
                    self.evaluate()
                    self.save()
                while progress.step < self.total_steps:
                    self.run_epoch()
            except Stopped as signal:
                stopped = True
                self.save()
                self.tracker.print(
                    f"stopped by {signal} after step {progress.step}; the same command resumes from there"
                )
        if stopped:
            runtime.exit_stopped()

    def run_epoch(self) -> None:
        """Train on the rest of the current epoch, or until the last step."""
        progress = self.progress
        self.sampler.set_epoch(progress.epoch, start=progress.samples)
        for inputs, targets in self.loader:
            with self.stop.agree():
                self.run_step(inputs, targets)
            if progress.step == self.total_steps:
                return
        progress.epoch += 1
        progress.samples = 0

    def run_step(self, inputs: Tensor, targets: Tensor) -> None:
        """Take one step, then log, evaluate and save if due."""
        progress, config = self.progress, self.config
        lr = float(self.scheduler.get_last_lr()[0])
        loss, norm = self.step(inputs, targets)
        progress.step += 1
        progress.samples += config.data.global_batch_size
        self.tracker.advance()
        if progress.step == self.first_step + 1:
            self.end_startup()
        is_last = progress.step == self.total_steps
        if is_last or is_due(progress.step, config.train.log_every):
            self.log(loss, norm, lr)
        # Evaluation first: the checkpoint then records whether it is the best.
        if is_last or is_due(progress.step, config.train.eval_every):
            self.evaluate()
        if is_last or is_due(progress.step, config.checkpoint.every_steps):
            self.save()

    def step(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Take one optimizer step, without waiting for the device.

        Args:
            inputs: This rank's share of the global batch, on the CPU.
            targets: Its targets.

        Returns:
            This rank's part of the mean loss, and the norm of the gradient (None unless it is clipped).
        """
        device, clip = self.process.device, self.config.train.clip_grad_norm
        inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        loss = self.parallel.forward_backward(inputs, targets, self.scaler)
        norm = None
        if clip is not None:
            self.scaler.unscale_(self.optimizer)  # Otherwise the scaled gradient would be clipped.
            norm = self.parallel.clip_grad_norm(clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss, norm

    def end_startup(self) -> None:
        """Print the time until the end of the first step, and shorten the wait for other ranks from now on."""
        if self.process.device.type != "cpu":
            torch.accelerator.synchronize()
        self.tracker.print(f"first step done {time.perf_counter() - STARTED:.1f} s after the start")
        runtime.set_timeout(self.config.distributed.timeout_seconds)
        self.start_clock()

    def start_clock(self) -> None:
        """Start measuring throughput."""
        self.clock, self.clock_step = time.perf_counter(), self.progress.step

    def log(self, loss: Tensor, norm: Tensor | None, lr: float) -> None:
        """Log the last step; only here does the loop wait for the device."""
        dist.all_reduce(loss)
        record: dict[str, Any] = {"event": "train", "step": self.progress.step, "epoch": self.progress.epoch}
        record |= {"loss": loss.item(), "lr": lr}
        if norm is not None:
            record["grad_norm"] = norm.item()
        steps, seconds = self.progress.step - self.clock_step, time.perf_counter() - self.clock
        if steps:
            record["samples_per_second"] = round(steps * self.config.data.global_batch_size / seconds, 1)
        self.tracker.log(record)
        self.start_clock()

    def evaluate(self) -> None:
        """Evaluate on the test set, and save the model if it is the best so far."""
        progress = self.progress
        progress.evaluation_due = True  # Until it is done, because a stop signal may interrupt it.
        record = self.evaluator()
        progress.evaluation_due = False
        self.tracker.log({"event": "eval", "step": progress.step, "split": "test", **record})
        value, sign = record[dataset.BEST_METRIC], 1 if dataset.HIGHER_IS_BETTER else -1
        if progress.best_value is None or sign * value > sign * progress.best_value:
            progress.best_step, progress.best_value = progress.step, value
            self.save()
        self.start_clock()

    def save(self) -> None:
        """Save a checkpoint of this step, unless one exists."""
        if self.saved_step < self.progress.step:
            self.parallel.average_buffers()
            self.checkpointer.save(self.progress)
            self.saved_step = self.progress.step
        self.start_clock()


def is_due(step: int, every: int | None) -> bool:
    """Return whether something that is done every ``every`` steps (None: never) is due after ``step``."""
    return every is not None and step % every == 0


def build_optimizer(module: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Build a fused AdamW with weight decay on matrices and kernels, but not on biases and normalization weights."""
    parameters = list(module.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def build_scheduler(optimizer: torch.optim.Optimizer, config: OptimConfig, planned_steps: int) -> LambdaLR:
    """Build a linear warm-up to the peak, followed by half a cosine down to ``min_lr_ratio`` of it."""
    end = config.decay_steps or planned_steps

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        done = min(1.0, (step - config.warmup_steps) / max(1, end - config.warmup_steps))
        return config.min_lr_ratio + (1 - config.min_lr_ratio) * (1 + math.cos(math.pi * done)) / 2

    return LambdaLR(optimizer, factor)
