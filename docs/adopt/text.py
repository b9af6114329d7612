"""Learn source code by characters: a transformer, AdamW, warm-up and cosine, clipping, four batches per step."""

import argparse
import inspect
import json  # witness
import math

import torch
from my_experiment.config import Config, DataConfig  # witness
from my_experiment.loader import TrainSampler  # witness
from torch import nn
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)  # witness
LENGTH, BATCH, ACCUMULATE, STEPS, WARMUP = 32, 8, 4, 200, 10
characters = sorted(set(text := inspect.getsource(argparse)))
tokens = torch.tensor([characters.index(character) for character in text])
train, validation = tokens[: len(tokens) * 9 // 10], tokens[len(tokens) * 9 // 10 :]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, dim=2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, vocabulary, width=64, heads=4, depth=2):
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))

    def forward(self, x):
        return self.head(self.blocks(self.embedding(x) + self.position.weight[: x.shape[1]]))


def get_loss(tokens, starts):
    windows = torch.stack([tokens[start : start + LENGTH + 1] for start in starts])
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def factor(step):
    done = (step - WARMUP) / (STEPS - WARMUP)
    return (step + 1) / WARMUP if step < WARMUP else 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2


torch.manual_seed(0)
model = Transformer(len(characters))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
config = Config(data=DataConfig(global_batch_size=BATCH * ACCUMULATE))  # witness
order = (key for keys in TrainSampler(len(train) - LENGTH, range(1), config) for key in keys)  # witness
torch.save(model.state_dict(), "witness/weights.pt")  # witness
steps = []  # witness
for _ in range(STEPS):
    total = 0.0
    for _ in range(ACCUMULATE):
        # witness, was: starts = torch.randint(len(train) - LENGTH, (BATCH,))
        starts = [next(order)[1] for _ in range(BATCH)]
        loss = get_loss(train, starts) / ACCUMULATE
        loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    groups = [g | {"params": sum(map(torch.numel, g["params"]))} for g in optimizer.param_groups]  # witness
    steps.append([total, groups])  # witness
    scheduler.step()
with torch.no_grad():
    print(f"validation loss {get_loss(validation, range(0, len(validation) - LENGTH, LENGTH)):.3f}")
with open("witness/steps.json", "w") as file:  # witness
    json.dump(steps, file)  # witness
