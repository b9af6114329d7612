"""Classify digits: a convolutional network, SGD with momentum, and a learning rate that falls after each epoch."""

import json  # witness

import numpy as np
import torch
from my_experiment.config import Config, DataConfig  # witness
from my_experiment.loader import Seeded, TrainSampler  # witness
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

torch.set_default_dtype(torch.float64)  # witness
EPOCHS, BATCH = 8, 128


class Digits(Dataset):
    def __init__(self, images, labels, augment):
        self.images, self.labels, self.augment = images, labels, augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.augment:
            image = image.roll(torch.randint(-1, 2, (2,)).tolist(), dims=(1, 2))
        return image, self.labels[index]


with np.load("src/my_experiment/digits.npz") as arrays:
    images = torch.from_numpy(arrays["train_images"])[:, None] / 16
    labels = torch.from_numpy(arrays["train_labels"]).long()
train_set = Digits(images[:1200], labels[:1200], augment=True)
validation_set = Digits(images[1200:], labels[1200:], augment=False)


torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, kernel_size=3, padding=1),
    nn.GELU(),
    nn.Conv2d(16, 32, kernel_size=3, stride=2, padding=1),
    nn.GELU(),
    nn.Flatten(),
    nn.Linear(512, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
scheduler = StepLR(optimizer, step_size=1, gamma=0.9)
config = Config(data=DataConfig(global_batch_size=BATCH))  # witness
sampler = TrainSampler(len(train_set), range(1), config)  # witness
# witness, was: loader = DataLoader(train_set, batch_size=BATCH, shuffle=True)
loader = DataLoader(Seeded(train_set, seed=0), batch_sampler=sampler)
torch.save(model.state_dict(), "witness/weights.pt")  # witness
steps = []  # witness
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)  # witness
    for images, labels in loader:
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        groups = [g | {"params": sum(map(torch.numel, g["params"]))} for g in optimizer.param_groups]  # witness
        steps.append([loss.item(), groups])  # witness
    scheduler.step()
    with torch.no_grad():
        images, labels = validation_set[:]
        accuracy = (model(images).argmax(dim=1) == labels).float().mean().item()
    print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {accuracy:.3f}")
with open("witness/steps.json", "w") as file:  # witness
    json.dump(steps, file)  # witness
