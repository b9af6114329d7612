"""What N processes send to add up K bytes, and what waiting for a slow one costs.

torchrun --standalone --nproc-per-node 8 docs/costs.py costs.svg
"""

import sys
import time
from functools import partial

import torch
import torch.distributed as dist
from matplotlib.figure import Figure


def server(gradient: torch.Tensor, rank: int, size: int) -> int:
    """Add up on rank 0, which sends the sum back; returns the bytes that this rank sent and received."""
    others = [0] if rank else range(1, size)
    for other in others:
        received = torch.zeros_like(gradient)
        dist.send(gradient, other) if rank else dist.recv(received, other)
        gradient += received
    for other in others:
        dist.recv(gradient, other) if rank else dist.send(gradient, other)
    return 2 * len(others) * gradient.nbytes


def ring(gradient: torch.Tensor, rank: int, size: int) -> int:
    """Send 1/N to the next rank, N - 1 times to add up and N - 1 times to copy sums; returns bytes as server does."""
    chunks = gradient.chunk(size)
    for step in range(2 * (size - 1)):
        out, into = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        received = torch.empty_like(into)
        sending = dist.isend(out, (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
        sending.wait()
        into.copy_(into + received if step < size - 1 else received)
    return 4 * (size - 1) * out.nbytes


def descend(rank: int, size: int, waits: bool, lr: float) -> float:
    """Minimize |w| with 240 gradients of N - 1 workers, one of which is slow, on a server; returns its last |w|."""
    weights, count = torch.ones(100), size - 1 if waits else 1
    while rank and not weights.isnan().any():
        time.sleep(0.02 if rank == 1 else 0.002)
        dist.send(weights, 0)  # The gradient of |w|^2 / 2 is w.
        dist.recv(weights, 0)
    for _ in range(0 if rank else 240 // count):
        gradients = torch.empty(count, 100)
        workers = [dist.recv(gradient) for gradient in gradients]  # Whoever comes first.
        weights -= lr * gradients.mean(dim=0)
        for worker in workers:
            dist.send(weights, worker)
    for _ in range(0 if rank else size - 1):
        dist.send(weights * torch.nan, dist.recv(torch.empty(100)))  # Ends a worker.
    return float(weights.norm())


dist.init_process_group("gloo")
rank, rows = dist.get_rank(), []
calls = [(f.__name__, mib, partial(f, torch.ones(mib * 2**18))) for f in (server, ring) for mib in (1, 4, 16)]
descents = [(f"waits: {w}", lr, partial(descend, waits=w, lr=lr)) for w in (True, False) for lr in (0.1, 1.2)]
for size in (2, 4, 8):
    for name, value, call in calls + (descents if size == 4 else []):
        dist.barrier()
        if rank < size:
            clock = time.perf_counter()
            rows.append((name, value, size, call(rank=rank, size=size), time.perf_counter() - clock))
if rank == 0:  # It has most to do.
    print(*rows, sep="\n")
    figure = Figure((8, 3), layout="constrained")
    for axes, column, unit in zip(figure.subplots(1, 2), (3, 4), ("bytes", "seconds"), strict=True):
        for name in ("server", "ring"):
            axes.plot((2, 4, 8), [row[column] for row in rows if row[:2] == (name, 16)], "o-", label=name)
        axes.set(xlabel="N processes", ylabel=f"{unit} of rank 0, K = 16 MiB", ylim=0)
        axes.legend()
    figure.savefig(sys.argv[1])
dist.destroy_process_group()
