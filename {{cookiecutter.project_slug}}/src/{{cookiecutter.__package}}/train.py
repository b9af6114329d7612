"""The loop: forward, backward, clip, step; and between steps what has to be logged, evaluated and saved."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from . import STARTED, dataset
from .checkpoint import Checkpointer, Progress
from .config import Config, OptimConfig
from .data import TrainSampler, build_loader
from .distributed import World, on_main, seed_rank, set_timeout
from .evaluate import Evaluator
from .lost import lost_ranks_told
from .model import build_model
from .parallel import Parallel
from .rundir import is_restart, sign_run, take_run
from .stop import Stopped, StopRequest, end_stopped
from .tracking import Tracker


def train(config: Config, world: World) -> None:
    """Train as ``config`` says, or go on where a checkpoint left off; all ranks call this together.

    Raises:
        UserError: if the settings do not fit the data, the model or the run directory.
    """
    restarts: list[Any] = [None] * world.size
    dist.all_gather_object(restarts, is_restart())
    candidates = on_main(lambda: take_run(config, any(restarts)), world)
    trainer = Trainer(config, world)
    trainer.progress = trainer.checkpointer.restore(candidates)
    on_main(lambda: sign_run(config, world.size, str(world.device)), world)
    trainer.run()


class Trainer:
    """One run on one rank: model, data and optimizer, and how far they have come."""

    def __init__(self, config: Config, world: World) -> None:
        self.config, self.world = config, world
        torch.manual_seed(config.run.seed)  # The same initial weights on every rank.
        train_set, test_set = dataset.build_datasets(config)
        self.parallel = Parallel(build_model(config.model), dataset.loss_fn, config, world)
        seed_rank(config.run.seed, world.rank)

        rank, size, batch = self.parallel.data_rank, self.parallel.data_size, config.data.global_batch_size
        self.sampler = TrainSampler(train_set, rank, size, batch, config.run.seed)
        self.loader = build_loader(train_set, self.sampler, batch // size, config.data, world.device)
        self.stop = StopRequest()
        self.evaluator = Evaluator(test_set, self.parallel, config, self.stop.heeded)

        planned_steps = config.train.epochs * (len(train_set) // batch)
        self.total_steps = min(planned_steps, config.train.max_steps or planned_steps)
        self.optimizer = build_optimizer(self.parallel, config.optim)
        self.scheduler = build_scheduler(self.optimizer, config.optim, planned_steps)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=config.train.precision == "fp16")

        others = {"scheduler": self.scheduler, "scaler": self.scaler}
        self.checkpointer = Checkpointer(self.parallel, self.optimizer, others, config, world)
        self.progress = Progress()
        set_timeout(config.distributed.startup_timeout_seconds)

    def run(self) -> None:
        """Train to the end, evaluate, save; or stop on request, save, and leave the rest to the next start."""
        progress, stopped = self.progress, False
        self.first_step = self.saved_step = progress.step
        tracker = Tracker(self.config, self.world, done=progress.step, total=self.total_steps)
        told = lost_ranks_told(lambda: f"after step {progress.step}")
        with tracker as self.tracker, self.checkpointer, self.stop, told:
            self.start_clock()
            try:
                if progress.evaluation_due:
                    self.saved_step = 0  # What was saved of this step does not know of its evaluation.
                    self.evaluate()
                    self.save()
                while progress.step < self.total_steps:
                    self.run_epoch()
            except Stopped as signal:
                stopped = True
                self.save()
                tracker.say(f"stopped by {signal} after step {progress.step}; the same command goes on from there")
        if stopped:
            end_stopped()

    def run_epoch(self) -> None:
        """Train on what is left of the current epoch, or until the last step."""
        progress = self.progress
        self.sampler.set_epoch(progress.epoch, start=progress.samples)
        for inputs, targets in self.loader:
            with self.stop.heeded():
                self.advance(inputs, targets)
            if progress.step == self.total_steps:
                return
        progress.epoch += 1
        progress.samples = 0

    def advance(self, inputs: Tensor, targets: Tensor) -> None:
        """One step, and what is due after it."""
        progress, config = self.progress, self.config
        lr = float(self.scheduler.get_last_lr()[0])
        loss, norm = self.step(inputs, targets)
        progress.step += 1
        progress.samples += config.data.global_batch_size
        self.tracker.advance()
        if progress.step == self.first_step + 1:
            self.after_first_step()
        last = progress.step == self.total_steps
        if last or is_due(progress.step, config.train.log_every):
            self.log(loss, norm, lr)
        # Evaluation first: the checkpoint then knows whether it is the best.
        if last or is_due(progress.step, config.train.eval_every):
            self.evaluate()
        if last or is_due(progress.step, config.checkpoint.every_steps):
            self.save()

    def step(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """One optimizer step; waits for nothing on the device.

        Args:
            inputs: This rank's share of the global batch, on the CPU.
            targets: Its targets.

        Returns:
            This rank's part of the mean loss, and the norm of the gradient (None unless it is clipped).
        """
        device, clip = self.world.device, self.config.train.clip_grad_norm
        inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        loss = self.parallel.forward_backward(inputs, targets, self.scaler)
        norm = None
        if clip is not None:
            self.scaler.unscale_(self.optimizer)  # Or the scaled gradient would be clipped.
            norm = self.parallel.clip_grad_norm(clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss, norm

    def after_first_step(self) -> None:
        """Start-up is over: tell how long it took, and wait less long for other ranks from now on."""
        if self.world.device.type != "cpu":
            torch.accelerator.synchronize()
        self.tracker.say(f"first step done {time.perf_counter() - STARTED:.1f} s after the start")
        set_timeout(self.config.distributed.timeout_seconds)  # Who is late now is lost.
        self.start_clock()

    def start_clock(self) -> None:
        """Measure throughput from here on."""
        self.clock, self.clock_step = time.perf_counter(), self.progress.step

    def log(self, loss: Tensor, norm: Tensor | None, lr: float) -> None:
        """Record the step just done; the one place in the loop that waits for the device."""
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
        """Score the test set, and save a model that is better than all before."""
        progress = self.progress
        progress.evaluation_due = True  # As long as it may be stopped.
        record = self.evaluator()
        progress.evaluation_due = False
        self.tracker.log({"event": "eval", "step": progress.step, "split": "test", **record})
        value, sign = record[dataset.BEST_BY], 1 if dataset.HIGHER_IS_BETTER else -1
        if progress.best_value is None or sign * value > sign * progress.best_value:
            progress.best_step, progress.best_value = progress.step, value
            self.save()
        self.start_clock()

    def save(self) -> None:
        """Write a checkpoint of this step, unless there is one."""
        if self.saved_step < self.progress.step:
            self.checkpointer.save(self.progress)
            self.saved_step = self.progress.step
        self.start_clock()


def is_due(step: int, every: int | None) -> bool:
    """Whether something that is done every ``every`` steps (None: never) is to be done after ``step``."""
    return every is not None and step % every == 0


def build_optimizer(parallel: Parallel, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW in its fused form, with weight decay on matrices and kernels but not on biases and gains."""
    parameters = list(parallel.module.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def build_scheduler(optimizer: torch.optim.Optimizer, config: OptimConfig, planned_steps: int) -> LambdaLR:
    """Linear warm-up to the peak, then half a cosine down to ``min_lr_ratio`` of it."""
    end = config.decay_steps or planned_steps

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        done = min(1.0, (step - config.warmup_steps) / max(1, end - config.warmup_steps))
        return config.min_lr_ratio + (1 - config.min_lr_ratio) * (1 + math.cos(math.pi * done)) / 2

    return LambdaLR(optimizer, factor)
