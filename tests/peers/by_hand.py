"""A hand-written loop, as in PyTorch's tutorials on DistributedDataParallel."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from experiment import Experiment, Log, end
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def train(wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel) -> None:
    """Train the model that ``wrap`` returns."""
    dist.init_process_group("gloo")
    experiment = Experiment()
    model = wrap(experiment.model)
    optimizer, scheduler = experiment.build_optimizer(model)
    sampler = DistributedSampler(experiment.train_set, drop_last=True)
    loader = DataLoader(experiment.train_set, batch_size=experiment.share, sampler=sampler, drop_last=True)
    log, step = Log(experiment), 0
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = experiment.loss(model(inputs), targets)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), experiment.config.train.clip_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if log.is_due(step):
                mean = loss.detach() / experiment.world_size
                dist.all_reduce(mean)
                log.write(step, mean.item(), norm.item(), scheduler.get_last_lr()[0])
            if step == experiment.steps:
                end()


if __name__ == "__main__":
    train()
