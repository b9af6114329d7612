"""The training loop: forward, backward, clip, step; between steps, log, save and evaluate when due."""

import math
import time
from typing import Any

import torch

from .config import Config, UserError
from .distributed import Process, StopSignal, derive_seed, seed_everything
from .evaluate import Evaluator
from .experiment import build_experiment
from .loader import TrainSampler, build_loader, to_device
from .logger import Logger, profile_steps
from .losses import MeanLosses
from .optim import build_optimizer, learning_rate
from .parallel import Parallel


class Trainer:
    """A run on one rank, resumed from the newest checkpoint if any."""

    def __init__(self, config: Config, process: Process) -> None:
        self.config, self.process, self.stop = config, process, StopSignal(process)
        self.checkpointer = Parallel.checkpointer(config, process)
        self.task, self.parallel, sets = build_experiment(config, process)
        batch, dp_size = config.data.global_batch_size, self.parallel.dp_size
        self.sampler = TrainSampler(len(sets[0]), self.parallel.dp_rank, dp_size, batch, config.run.seed)
        self.loader = build_loader(sets[0], self.sampler, batch // dp_size, config, process.device)
        self.losses = MeanLosses(self.task, process, batch // dp_size)
        self.evaluator = Evaluator(self.task, self.parallel, sets[1], config)
        self.scheduled_steps = config.train.epochs * self.sampler.steps_per_epoch
        self.total_steps = min(self.scheduled_steps, config.train.max_steps or self.scheduled_steps)
        self.optimizer = build_optimizer(self.parallel.module, config.optim)
        self.steps, changes = self.checkpointer.restore(self.parallel, self.optimizer, [len(each) for each in sets])
        self.logger = Logger(config, process, self.steps, self.total_steps, changes)
        self.recent, self.waited = list[dict[str, Any]](), 0.0  # Since a log.

    def run(self) -> bool:
        """Train to the last step, or until a stop signal; returns whether one stopped it."""
        stopped = False
        if self.steps and self.evaluates() and not any(self.process.all_gather(self.steps in self.logger.evaluations)):
            self.evaluate()  # It ended between checkpoint and evaluation.
        self.clock = self.ready = time.perf_counter()
        with self.checkpointer.writer, profile_steps(self.config, self.process) as profiler:
            while self.steps < self.total_steps and not stopped:
                self.sampler.set_epoch(*self.sampler.position(self.steps))
                for batch in self.loader:
                    self.waited += time.perf_counter() - self.ready
                    self.step(*to_device(batch, self.process.device))
                    if profiler:
                        profiler.step()
                    stopped = self.finish_step()
                    self.ready = time.perf_counter()
                    if stopped or self.steps == self.total_steps:
                        break
        self.checkpointer.finish()
        self.checkpointer.prune(self.logger.best_steps(self.task))
        if stopped:
            self.logger.print(f"stopped after step {self.steps}; the same command resumes it")
        #:: if file("tracker", "tracker.py") ::#
        self.logger.close()
        #:: endif ::#
        return stopped

    #:: if fact("loop") ::#
    #:: filter indent(4, true) ::#
    #:: include "task/" ~ cookiecutter.task ~ "/step.py" ::#
    #:: endfilter ::#
    #:: else ::#
    def step(self, inputs: Any, targets: Any) -> None:
        """Take one step with this rank's batch, without waiting for the device."""
        seed = derive_seed(self.config.run.seed, "step", self.steps, self.parallel.dp_rank)
        seed_everything(seed, self.process.device)
        self.recent.append(self.update(*self.task.prepare(inputs, targets)))
        self.steps += 1
    #:: endif ::#

    def update(self, inputs: Any, targets: Any) -> dict[str, Any]:
        """Take one optimizer step; returns its losses and the norm of its gradient."""
        parallel, losses = self.parallel, self.losses
        losses.weigh(targets)
        parallel.forward_backward(inputs, targets, losses)
        self.check_gradients()
        rate = learning_rate(self.steps, self.scheduled_steps, self.config.optim) / self.config.optim.lr
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.setdefault("initial_lr", group["lr"])
        parallel.scaler.unscale_(self.optimizer)
        norm = parallel.clip_grad_norm(self.config.train.clip_grad_norm or math.inf)
        parallel.scaler.step(self.optimizer)
        parallel.scaler.update()
        self.optimizer.zero_grad()
        return losses.sums and {**losses.sums, "grad_norm": norm}  # Some ranks have no outputs.

    def check_gradients(self) -> None:
        """Reject parameters that the loss does not depend on."""
        missing = {p for p in self.checkpointer.trained if p.grad is None}
        if missing and not self.config.train.allow_unused:
            unused = [name for name, p in self.parallel.module.named_parameters() if p in missing]
            raise UserError(f"the loss does not depend on {unused[:5]}; use or freeze them, or set train.allow_unused")

    def finish_step(self) -> bool:
        """Log, save and evaluate if due; returns whether all ranks stop."""
        step, evaluates = self.steps, self.evaluates()
        saves = evaluates or step % (self.config.checkpoint.every_steps or math.inf) == 0
        logs = saves or step % self.config.train.log_every == 0
        if self.logger.erase:
            self.logger.print(f"step {step}/{self.total_steps}", end="")
        stopped = self.stop.agreed(must_check=logs)
        if logs or stopped:
            self.log()
        if saves or stopped:  # Before what takes long.
            epoch, samples = self.sampler.position(step)
            self.checkpointer.save({"step": step, "epoch": epoch, "samples": samples})
        if evaluates and not stopped:
            self.evaluate()
        if saves:
            self.checkpointer.prune(self.logger.best_steps(self.task))
            self.clock = time.perf_counter()
        return stopped

    def evaluates(self) -> bool:
        """Return whether an evaluation follows the current step."""
        return self.steps == self.total_steps or self.steps % (self.config.train.eval_every or math.inf) == 0

    def log(self) -> None:
        """Log the last step; reject what is not finite. Only here, it waits."""
        steps, scaler = self.losses.average(self.recent), self.parallel.scaler
        skips = scaler.is_enabled() and scaler.get_scale() >= 1  # It skips such steps.
        for step, numbers in enumerate(steps, start=self.steps - len(steps) + 1):
            if not all(math.isfinite(x) for name, x in numbers.items() if not (skips and name == "grad_norm")):
                raise UserError(f"step {step} has {numbers}; lower optim.lr, or look at its data and weight")
        seconds = time.perf_counter() - self.clock
        rate = self.config.data.global_batch_size * len(steps) / seconds
        head = {"event": "train", "step": self.steps, "epoch": self.sampler.position(self.steps)[0]}
        others = {"lr": self.optimizer.param_groups[0]["lr"], "samples_per_second": rate}
        others |= {"seconds_per_step": seconds / len(steps), "data_share": self.waited / seconds}
        if self.process.device.type == "cuda":
            others["peak_memory_gib"] = torch.accelerator.max_memory_allocated() / 2**30
        self.logger.log(head, steps[-1], others | self.task.throughput(rate))
        self.checkpointer.finish(wait=False, raises=False)
        self.recent, self.waited, self.clock = [], 0.0, time.perf_counter()

    def evaluate(self) -> None:
        """Evaluate on the validation set, uncompiled: its size differs."""
        with torch.compiler.set_stance("force_eager" if self.config.train.compile else "default"):
            metrics = self.evaluator(self.process)
        head = {"event": "eval", "step": self.steps, "split": "validation", "num_samples": self.evaluator.length}
        self.logger.log(head, metrics)
