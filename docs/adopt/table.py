"""Predict a column of a table whose rows have weights: a perceptron, and Adam with L2 and an epsilon of its own."""

import json  # witness

import numpy as np
import torch
from my_experiment.config import Config, DataConfig  # witness
from my_experiment.loader import Seeded, TrainSampler  # witness
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)  # witness
EPOCHS, BATCH = 20, 128


def make_table(rows):
    generator = np.random.default_rng(0)
    x = generator.random((rows, 8))
    noise = generator.uniform(0.1, 1.0, size=rows)  # Standard deviation of each row.
    y = 5 * np.sin(3 * x[:, 0] * x[:, 1]) + 4 * x[:, 2] ** 2 + 2 * x[:, 3] + noise * generator.normal(size=rows)
    return x, y, 1 / noise**2


x, y, weight = make_table(2500)
train, validation = slice(0, 1600), slice(1600, 2000)
x = (x - x[train].mean(axis=0)) / x[train].std(axis=0)
y = (y - y[train].mean()) / y[train].std()
x, y, weight = (torch.tensor(each, dtype=torch.get_default_dtype()) for each in (x, y, weight))
train_set = TensorDataset(x[train], y[train], weight[train])


class Perceptron(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        return self.head(self.layers(x)).squeeze(1)


def mean_loss(predictions, y, weight):
    return (weight * (predictions - y) ** 2).sum() / weight.sum()


torch.manual_seed(0)
model = Perceptron(64)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-4, weight_decay=1e-3)
config = Config(data=DataConfig(global_batch_size=BATCH))  # witness
sampler = TrainSampler(len(train_set), range(1), config)  # witness
# witness, was: loader = DataLoader(train_set, batch_size=BATCH, shuffle=True, drop_last=True)
loader = DataLoader(Seeded(train_set, seed=0), batch_sampler=sampler)
torch.save(model.state_dict(), "witness/weights.pt")  # witness
steps = []  # witness
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)  # witness
    for batch in loader:
        loss = mean_loss(model(batch[0]), *batch[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        groups = [g | {"params": sum(map(torch.numel, g["params"]))} for g in optimizer.param_groups]  # witness
        steps.append([loss.item(), groups])  # witness
    with torch.no_grad():
        validated = mean_loss(model(x[validation]), y[validation], weight[validation])
    print(f"epoch {epoch}: loss {loss.item():.4f}, validation loss {validated:.4f}")
with open("witness/steps.json", "w") as file:  # witness
    json.dump(steps, file)  # witness
