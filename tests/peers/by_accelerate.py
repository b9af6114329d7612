"""The loop of Accelerate's quick tour."""

from __future__ import annotations

import itertools

from accelerate import Accelerator
from experiment import Experiment, Log, end
from torch.utils.data import DataLoader


def train() -> None:
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    experiment = Experiment()
    loader = DataLoader(experiment.train_set, batch_size=experiment.share, shuffle=True, drop_last=True)
    optimizer, scheduler = experiment.build_optimizer(experiment.model)
    model, optimizer, loader, scheduler = accelerator.prepare(experiment.model, optimizer, loader, scheduler)
    log, step = Log(experiment), 0
    for _ in itertools.count():
        for inputs, targets in loader:
            loss = experiment.loss(model(inputs), targets)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), experiment.config.train.clip_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if log.is_due(step):
                mean = accelerator.reduce(loss.detach(), reduction="mean")
                log.write(step, mean.item(), norm.item(), scheduler.get_last_lr()[0])
            if step == experiment.steps:
                end()


if __name__ == "__main__":
    train()
