"""When gradients are ready in a backward under DDP, and when each bucket of them is all-reduced, on rank 0 of two.

.venv/bin/torchrun --standalone --nproc-per-node 2 docs/overlap.py docs/overlap.svg
"""

import sys
import time

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LAYERS = 6
ready: list[float] = []  # When the gradients of a layer are there, the last layer first.
sent: list[tuple[float, float]] = []  # When an all-reduce starts and ends.


def all_reduce(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket as DDP does, and note when."""
    start, gradients = time.perf_counter(), bucket.buffer().div_(dist.get_world_size())

    def finish(future: torch.futures.Future) -> torch.Tensor:
        sent.append((start, time.perf_counter()))
        return gradients

    return dist.all_reduce(gradients, async_op=True).get_future().then(finish)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(LAYERS)))
ddp = DistributedDataParallel(model, bucket_cap_mb=4)  # A bucket for each layer.
ddp.register_comm_hook(None, all_reduce)
for weight in model.parameters():
    weight.register_post_accumulate_grad_hook(lambda _: ready.append(time.perf_counter()))
for _ in range(3):  # DDP arranges its buckets in the first one.
    loss = ddp(torch.randn(1024, 1024)).square().mean()
    dist.barrier()
    ready.clear()
    sent.clear()
    begin = time.perf_counter()
    loss.backward()
backward = list(zip([begin, *ready], ready, strict=False))
if dist.get_rank() == 0:
    figure = Figure((8, 3), layout="constrained")
    axes = figure.subplots()
    for name, row, spans in (("backward", 0, backward), ("all-reduce", 1, sorted(sent))):
        for index, (start, end) in enumerate(spans):
            left, width, height = (start - begin) * 1000, (end - start) * 1000, row * (index + 1)
            print(f"{name} of layer {LAYERS - index}: from {left:.0f} to {left + width:.0f} ms")
            axes.barh(height, width, left=left, color=f"C{row}", edgecolor="white")
            axes.text(left + width / 2, height, str(LAYERS - index), ha="center", va="center", color="white")
    labels = ["backward, by layer", *(f"all-reduce of layer {LAYERS - index}" for index in range(LAYERS))]
    axes.set(yticks=range(LAYERS + 1), yticklabels=labels, xlabel="milliseconds since backward began, on rank 0")
    axes.invert_yaxis()
    figure.savefig(sys.argv[1])
dist.destroy_process_group()
