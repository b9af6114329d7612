"""The training loop: forward, backward, clip, step; between steps, log, save and evaluate when due."""

import math
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .config import Config, UserError
from .distributed import Process, StopSignal, derive_seed, seed_everything
from .evaluate import Evaluator, build_experiment
from .loader import TrainSampler, build_loader, to_device
from .logger import Logger, profile_steps
from .optim import build_optimizer, learning_rate
from .parallel import Checkpointer


class Trainer:
    """A run on one rank, resumed from the newest checkpoint if any."""

    def __init__(self, config: Config, process: Process) -> None:
        self.config, self.process, self.stop = config, process, StopSignal(process)
        self.checkpointer = Checkpointer(config, process)
        self.task, self.parallel, train_set, test_set = build_experiment(config, process)
        batch, seed, dp_size = config.data.global_batch_size, config.run.seed, self.parallel.dp_size
        self.local_batch_size = batch // dp_size
        self.sampler = TrainSampler(len(train_set), self.parallel.dp_rank, dp_size, batch, seed)
        self.loader = build_loader(train_set, self.sampler, self.local_batch_size, config.data, process.device, seed)
        self.evaluator = Evaluator(self.task, self.parallel, test_set, config)
        self.scheduled_steps = config.train.epochs * self.sampler.steps_per_epoch
        self.total_steps = min(self.scheduled_steps, config.train.max_steps or self.scheduled_steps)
        self.optimizer = build_optimizer(self.parallel.module, config.optim)
        self.steps, changes = self.checkpointer.restore(self.parallel, self.optimizer, [len(train_set), len(test_set)])
        self.logger = Logger(config, process, self.steps, self.total_steps, changes)
        if dp_size > 1 and any(process.all_gather(": BatchNorm" in str(self.parallel.module))):
            self.logger.print("BatchNorm uses each rank's samples: the result depends on the number of ranks")
        self.recent: list[tuple[dict[str, Tensor], Tensor]] = []  # Losses and norms since the last record.
        self.waited = 0.0  # For data, in seconds since then.
        self.clock = self.ready = time.perf_counter()

    def run(self) -> bool:
        """Train to the last step, or until a stop signal; returns whether one stopped it."""
        stopped = False
        if self.steps and self.evaluates() and not any(self.process.all_gather(self.steps in self.logger.evaluations)):
            self.evaluate()  # The run ended between checkpoint and evaluation.
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
            self.logger.print(f"stopped after step {self.steps}; the same command resumes from there")
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
        """Take one optimizer step with this rank's local batch, without waiting for the device."""
    #:: endif ::#
        config, parallel = self.config, self.parallel
        #:: if not fact("loop") ::#
        seed_everything(derive_seed(config.run.seed, "step", self.steps, parallel.dp_rank), self.process.device)
        inputs, targets = self.task.prepare(inputs, targets)
        #:: endif ::#
        losses = parallel.forward_backward(inputs, targets, self.mean_weight(targets))
        self.check_gradients()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.steps, self.scheduled_steps, config.optim)
        parallel.scaler.unscale_(self.optimizer)
        norm = parallel.clip_grad_norm(config.train.clip_grad_norm or math.inf)
        parallel.scaler.step(self.optimizer)
        parallel.scaler.update()
        self.optimizer.zero_grad()
        #:: if not fact("loop") ::#
        self.recent.append((losses, norm))
        self.steps += 1
        #:: else ::#
        return losses, norm
        #:: endif ::#

    def mean_weight(self, targets: Any) -> int | Tensor:
        """Return what the losses of a local batch are divided by, on average over the ranks."""
        weight, samples = self.task.weight(targets), self.local_batch_size
        if isinstance(weight, Tensor):
            total = weight.detach().to(self.process.device, torch.float32, copy=True)
            dist.all_reduce(total)
            return total / self.process.world_size
        if weight < samples or weight % samples:
            raise UserError(f"Task.weight is {weight} for {samples} samples; return a multiple, or a tensor")
        return weight

    def check_gradients(self) -> None:
        """Reject parameters that the loss does not depend on."""
        missing = any(p.grad is None for group in self.optimizer.param_groups for p in group["params"])
        if missing and not self.config.train.allow_unused:
            named = self.parallel.module.named_parameters()
            unused = [name for name, p in named if p.requires_grad and p.grad is None]
            names = ", ".join(unused[:5]) or "a parameter that is not the model's"
            raise UserError(f"the loss does not depend on {names}; use or freeze them, or set train.allow_unused")

    def finish_step(self) -> bool:
        """Log, save and evaluate if due; returns whether all ranks are to stop."""
        step, evaluates = self.steps, self.evaluates()
        saves = evaluates or step % (self.config.checkpoint.every_steps or math.inf) == 0
        logs = saves or step % self.config.train.log_every == 0
        if self.logger.erase:
            self.logger.print(f"step {step}/{self.total_steps}", end="")
        stopped = self.stop.agreed(must_check=logs)
        if logs or stopped:
            self.log()
        if saves or stopped:
            self.save()  # Before the evaluation, which may take longer than a stop signal leaves.
        if evaluates and not stopped:
            self.evaluate()
        if saves:
            self.checkpointer.prune(self.logger.best_steps(self.task))
        return stopped

    def evaluates(self) -> bool:
        """Return whether the current step is followed by an evaluation."""
        return self.steps == self.total_steps or self.steps % (self.config.train.eval_every or math.inf) == 0

    def log(self) -> None:
        """Log the last step; reject what was not finite since the last record. Only here, it waits."""
        names, norms = list(self.recent[0][0]), torch.stack([norm for _, norm in self.recent])
        losses = torch.stack([torch.stack(list(each.values())) for each, _ in self.recent])
        dist.all_reduce(losses)
        losses /= self.parallel.dp_size
        step, scaler = self.steps, self.parallel.scaler
        finite = losses.isfinite().all(dim=1)
        if not scaler.is_enabled() or scaler.get_scale() < 1:  # Else it skips what overflows.
            finite &= norms.isfinite()
        if not finite.all():
            first = int(finite.int().argmin())
            found = f"losses of {losses[first].tolist()} and a gradient norm of {norms[first]}"
            raise UserError(f"step {step - len(norms) + 1 + first} has {found}; lower optim.lr, or look at its data")
        seconds = time.perf_counter() - self.clock
        rate = self.config.data.global_batch_size * len(norms) / seconds
        record: dict[str, Any] = {"event": "train", "step": step, "epoch": self.sampler.position(step)[0]}
        record |= dict(zip(names, losses[-1].tolist(), strict=True))
        record |= {"lr": self.optimizer.param_groups[0]["lr"], "grad_norm": norms[-1].item()}
        record |= {"seconds_per_step": seconds / len(norms), "data_share": self.waited / seconds}
        if self.process.device.type == "cuda":
            record["peak_memory_gib"] = torch.accelerator.max_memory_allocated() / 2**30
        self.logger.log(record | {"samples_per_second": rate} | self.task.throughput(rate))
        self.checkpointer.finish(wait=False, raises=False)
        self.recent, self.waited, self.clock = [], 0.0, time.perf_counter()

    def evaluate(self) -> None:
        """Evaluate on the test set."""
        # To compile it for another batch size would take longer.
        with torch.compiler.set_stance("force_eager") if self.config.train.compile else nullcontext():
            metrics = self.evaluator(self.process)
        self.logger.log({"event": "eval", "step": self.steps, "split": "test", **metrics})
        self.clock = time.perf_counter()

    def save(self) -> None:
        """Save a checkpoint of this step."""
        epoch, samples = self.sampler.position(self.steps)
        self.checkpointer.save({"step": self.steps, "epoch": epoch, "samples": samples})
        self.clock = time.perf_counter()
