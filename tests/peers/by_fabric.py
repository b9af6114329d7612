"""The loop of Fabric's documentation."""

from __future__ import annotations

import itertools

import torch
from experiment import Experiment, Log, end
from lightning.fabric import Fabric
from torch.utils.data import DataLoader


def train() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    experiment = Experiment()
    optimizer, scheduler = experiment.build_optimizer(experiment.model)
    model, optimizer = fabric.setup(experiment.model, optimizer)
    loader = fabric.setup_dataloaders(
        DataLoader(experiment.train_set, batch_size=experiment.share, shuffle=True, drop_last=True)
    )
    log, step = Log(experiment), 0
    for epoch in itertools.count():
        loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = experiment.loss(model(inputs), targets)
            fabric.backward(loss)
            norm = fabric.clip_gradients(model, optimizer, max_norm=experiment.config.train.clip_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if log.is_due(step):
                mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
                assert isinstance(mean, torch.Tensor) and isinstance(norm, torch.Tensor)
                log.write(step, mean.item(), norm.item(), scheduler.get_last_lr()[0])
            if step == experiment.steps:
                end()


if __name__ == "__main__":
    train()
