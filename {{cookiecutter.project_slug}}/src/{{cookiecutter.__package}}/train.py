"""The training loop: forward, backward, clip, step; between steps, log, evaluate and save when due."""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from . import STARTED, dataset, runtime
from .checkpoint import Checkpointer, Progress, check_replicas, load_weights
from .config import Config, UserError
from .data import build_train_loader
from .evaluate import Evaluator
from .launch import acquire_run_directory, is_restart
from .model import build_model
from .optim import Schedule, build_optimizer, count_steps
from .parallel import Parallel
from .reporting import FiniteGuard, Pace, Tracker, check_finite, collect_examples, write_provenance
from .runtime import Process, Stopped, StopSignal, on_main, report_failures
from .splitting import to_device, unpack


def train(config: Config, process: Process) -> None:
    """Train with the settings of ``config``, or resume from a checkpoint of the run; a collective.

    Rejects settings that do not fit the data, the model or the run directory.
    """
    run_dir, resume = Path(config.run.dir), config.checkpoint.resume
    restarted = any(runtime.all_gather_object(is_restart()))
    candidates = on_main(lambda: acquire_run_directory(run_dir, resume, restarted))
    trainer = Trainer(config, process, weights=None if candidates else config.model.weights)
    trainer.restore(candidates)
    run_id, step = trainer.progress.run_id, trainer.progress.step
    on_main(lambda: write_provenance(run_dir, asdict(config), process, run_id, step))
    stopped = trainer.run()
    del trainer  # Its loader processes end in order when it is gone.
    runtime.exit_if(stopped)


class Trainer:
    """One run on one rank: its model, data, optimizer and progress; ``weights`` is a file of weights to start from."""

    def __init__(self, config: Config, process: Process, weights: str | None = None) -> None:
        self.config, self.process = config, process
        if config.train.memory_snapshot:
            runtime.record_allocations(process.device, Path(config.run.dir) / f"memory-rank{process.rank}.pickle")
        torch.manual_seed(config.run.seed)  # The same initial weights on every rank.
        train_set, test_set = dataset.build_datasets(config)
        self.parallel = Parallel(lambda: build_model(config.model), dataset.loss_fn, config, process)
        if weights is not None:
            load_weights(Path(weights), config.model.weights_except, self.parallel.module, process.device)
        runtime.seed_rank(config.run.seed, process.rank)

        run_dir = Path(config.run.dir)
        self.checkpointer = Checkpointer(self.parallel.module, asdict(config), run_dir, config.checkpoint, process)
        register = self.checkpointer.register
        self.stop = StopSignal(config.distributed.agree_seconds)
        data, seed, agree = config.data, config.run.seed, self.stop.agree
        self.sampler, self.loader = build_train_loader(train_set, self.parallel, data, seed, register, agree)
        self.evaluator = Evaluator(test_set, self.parallel, data, seed, agree, self.loader)
        planned_steps, self.total_steps = count_steps(self.sampler.steps_per_epoch, config.train, config.optim)
        self.optimizer = build_optimizer(self.parallel.module, config.optim, register)
        self.scheduler = Schedule(self.optimizer, config.optim, planned_steps)
        self.scaler = torch.amp.GradScaler(process.device.type, enabled=config.train.precision == "fp16")
        register("scheduler", self.scheduler)
        register("scaler", self.scaler)
        self.guard = FiniteGuard(self.parallel.module, config.train.on_nonfinite, self.scaler)

        self.tracker = Tracker(run_dir, process.is_main, dataset.BEST_METRIC, getattr(dataset, "UNITS", {}))
        self.progress, self.saved, self.first_step = Progress(), Progress(), 0
        tokens = getattr(train_set, "tokens_per_sample", 0)
        self.pace = Pace(self.parallel, data.global_batch_size, process.device, self.sampler, tokens)
        runtime.set_timeout(config.distributed.startup_timeout_seconds)

    def restore(self, candidates: Sequence[Path]) -> None:
        """Resume from the first of the ``candidates`` that can be read, if there are any."""
        config, progress = self.config, self.checkpointer.restore(candidates)
        progress.run_id = progress.run_id or on_main(lambda: uuid4().hex[:16])
        self.progress, self.first_step, self.saved = progress, progress.step, replace(progress)
        if (steps := self.sampler.steps_per_epoch) is not None:
            others = progress.step - progress.epoch * steps - progress.samples // config.data.global_batch_size
            planned_steps, self.total_steps = count_steps(steps, config.train, config.optim, others)
            self.scheduler.end_at(planned_steps)

    def run(self) -> bool:
        """Train to the end; on a stop signal, save, leave the remaining steps to the next start, and return True."""
        progress, stopped = self.progress, False
        self.parallel.align_random_state()
        recording = self.tracker.record(progress.step, self.total_steps, progress.evaluated_step)
        with self.stop, recording, self.checkpointer, report_failures(lambda: f"after step {progress.step}"):
            ranks = f"{self.process.world_size} rank(s), {self.process.device.type}"
            self.tracker.print(f"{self.config.run.dir}: step {progress.step} of {self.total_steps or '?'} on {ranks}")
            self.pace.start(self.progress.step)
            try:
                if self.is_evaluation_due():
                    self.evaluate()
                while progress.step < (self.total_steps or math.inf) and progress.epoch < self.config.train.epochs:
                    self.run_epoch()
                if progress.step == 0:
                    raise UserError("no epoch of the stream has data.global_batch_size samples; lower it")
                self.finish()
            except Stopped as signal:
                stopped = True
                self.save()
                where = f"after step {progress.step}; the same command resumes from there"
                self.tracker.print(f"stopped by {signal} {where}")
        return stopped

    def run_epoch(self) -> None:
        """Train on the rest of the current epoch, or until the last step."""
        progress, epoch = self.progress, self.progress.epoch
        self.sampler.set_epoch(epoch, start=progress.samples)
        for batch in self.loader:
            with self.stop.agree():
                self.run_step(*unpack(batch))
            if progress.step == self.total_steps:
                return
        progress.epoch, progress.samples = epoch + 1, 0

    def finish(self) -> None:
        """Evaluate unless the last step did (the end of a stream is not known before it), save, and show examples."""
        if self.progress.evaluated_step < self.progress.step:
            self.save()
            self.evaluate()
        if self.saved != self.progress:
            self.write_checkpoint()
        self.stop.restart()
        self.tracker.finish(collect_examples(dataset, self.evaluator))

    def is_evaluation_due(self) -> bool:
        """Return whether this step is to be evaluated, and has not been yet: a stop signal may interrupt it."""
        progress = self.progress
        is_due_now = progress.step == self.total_steps or is_due(progress.step, self.config.train.eval_every)
        return is_due_now and progress.evaluated_step < progress.step

    def run_step(self, inputs: Any, targets: Any) -> None:
        """Take one step, then log, evaluate and save if due."""
        progress, config = self.progress, self.config
        lr = float(self.scheduler.get_last_lr()[0])
        self.guard.begin(progress.epoch, progress.samples)
        losses, norm = self.step(inputs, targets)
        progress.step += 1
        progress.samples += config.data.global_batch_size
        self.tracker.advance()
        if progress.step == self.first_step + 1:
            self.end_startup()
        is_last = progress.step == self.total_steps
        if is_last or is_due(progress.step, config.train.log_every):
            self.log(losses, norm, lr)
        if is_due(progress.step, config.train.check_replicas_every):
            check_replicas(self.checkpointer.replicable_state(), progress.step)
        if progress.samples // config.data.global_batch_size == self.sampler.steps_per_epoch:
            progress.epoch, progress.samples = progress.epoch + 1, 0
        # Before the evaluation, which may fail; a run that resumes from there evaluates again.
        if is_last or is_due(progress.step, config.checkpoint.every_steps):
            self.save()
        if self.is_evaluation_due():
            self.evaluate()

    def step(self, inputs: Any, targets: Any) -> tuple[dict[str, Tensor], Tensor]:
        """Take one optimizer step with this rank's share of the global batch, without waiting for the device.

        Returns this rank's part of each mean loss, and the norm of the whole model's gradient before it is clipped.
        """
        device, clip = self.process.device, self.config.train.clip_grad_norm
        inputs, targets = to_device(inputs, device), to_device(targets, device)
        self.pace.count_alone()
        losses = self.parallel.forward_backward(inputs, targets, self.scaler)
        self.scaler.unscale_(self.optimizer)  # Otherwise the scaled gradient would be clipped.
        norm = self.parallel.clip_grad_norm(math.inf if clip is None else clip)
        self.pace.begin_alone()  # What follows, each rank does alone; a slow one shows.
        self.guard.protect(losses["loss"], norm, self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return losses, norm

    def end_startup(self) -> None:
        """Print the time until the end of the first step, and shorten the wait for other ranks from now on."""
        if self.process.device.type != "cpu":
            torch.accelerator.synchronize()
        self.tracker.print(f"first step done {time.perf_counter() - STARTED:.1f} s after the start")
        runtime.set_timeout(self.config.distributed.timeout_seconds)
        self.pace.start(self.progress.step)

    def log(self, losses: dict[str, Tensor], norm: Tensor, lr: float) -> None:
        """Log the last step, with one message; only here does the loop wait for the device."""
        # The guard waits for the device, which is no work of this rank's processor.
        own = self.pace.count(), self.guard.count(), torch.stack(list(losses.values())).tolist()
        paces, guards, parts = runtime.all_gather_numbers(*own, device=self.process.device)
        skipped = check_finite(self, guards)
        means = dict(zip(losses, map(sum, zip(*parts, strict=True)), strict=True))
        record: dict[str, Any] = {"event": "train", "step": self.progress.step, "epoch": self.progress.epoch}
        record |= means | {"lr": lr, "grad_norm": norm.item()} | getattr(self.sampler, "metrics", {}) | skipped
        self.tracker.log(record | self.pace.measure(self.progress.step, paces))

    def evaluate(self) -> None:
        """Evaluate on the test set, and save the model if it is the best so far."""
        check_finite(self)
        self.stop.restart()
        record = self.evaluator()
        self.tracker.log({"event": "eval", "step": self.progress.step, "split": "test", **record})
        if self.progress.note_evaluation(record[dataset.BEST_METRIC], dataset.HIGHER_IS_BETTER):
            self.save()
        self.pace.start(self.progress.step)

    def save(self) -> None:
        """Save a checkpoint of this step, unless one exists."""
        if self.saved.step < self.progress.step:
            self.write_checkpoint()

    def write_checkpoint(self) -> None:
        """Save a checkpoint of this step, in place of one that exists."""
        check_finite(self)
        self.parallel.average_buffers()
        with runtime.timeout(self.config.checkpoint.timeout_seconds):
            self.checkpointer.save(self.progress)
        self.saved = replace(self.progress)
        self.pace.start(self.progress.step)


def is_due(step: int, every: int | None) -> bool:
    """Return whether something that is done every ``every`` steps (None: never) is due after ``step``."""
    return every is not None and step % every == 0
