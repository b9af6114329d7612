"""Measures the links between ranks: clocks, an all-reduce over all, and point-to-point between neighbours."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .distributed import World
from .findings import Row

WARM_UP, REPEATS = 2, 5
MIB = 2**20


def measure(world: World, device: torch.device) -> list[Row]:
    """Rows of all that is measured between the ranks, the same on each; a collective."""
    if world.size == 1:
        return [Row(name, "alone, nothing to measure") for name in ("clocks", "all-reduce", "point to point")]
    # On a CPU the ranks compute what they send, and share its processors.
    large = (8 if device.type == "cpu" else 64) * MIB
    between, slowest = neighbours(large, device)
    return [clocks(), sums(device), between, *(all_reduce(size, slowest, device) for size in (MIB, large))]


def gather(mine: Any) -> list[Any]:
    """What each rank has, in the order of the ranks; a collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def now(device: torch.device) -> float:
    """The time in seconds, when the device has done all its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def median_seconds(action: Callable[[], object], device: torch.device) -> float:
    """How long ``action`` takes on this rank, when all ranks start it together; a collective."""
    times = []
    for _ in range(WARM_UP + REPEATS):
        dist.barrier()
        start = now(device)
        action()
        times.append(now(device) - start)
    return statistics.median(times[WARM_UP:])


def clocks() -> Row:
    """How far the clocks are apart, as exactly as a barrier ends on all ranks at once: to some milliseconds."""
    stamps = []
    for _ in range(REPEATS):
        dist.barrier()
        stamps.append(time.time())
    everyone = gather(stamps)
    ahead = [statistics.median(a - b for a, b in zip(mine, everyone[0], strict=True)) for mine in everyone]
    apart = max(ahead) - min(ahead)
    found = f"{1000 * apart:.1f} ms apart"
    if apart > 1:
        who = f"rank {ahead.index(max(ahead))} is ahead of rank {ahead.index(min(ahead))}"
        return Row("clocks", found, "warn", f"{who}; synchronise them (NTP), or times in logs do not compare")
    return Row("clocks", found)


def sums(device: torch.device) -> Row:
    """Whether an all-reduce adds up: rank r gives r + 1 a thousand times, so that every sum is N (N + 1) / 2."""
    size = dist.get_world_size()
    values = torch.full((1000,), dist.get_rank() + 1.0, device=device)
    dist.all_reduce(values)
    right = gather(bool((values == size * (size + 1) / 2).all()))
    if not all(right):
        wrong = ", ".join(str(rank) for rank, fine in enumerate(right) if not fine)
        return Row("sum over ranks", f"wrong on rank {wrong}", "fail", "do not train on these devices and this network")
    return Row("sum over ranks", f"right on all {size}")


def all_reduce(size: int, link: float, device: torch.device) -> Row:
    """Bandwidth of an all-reduce of ``size`` bytes, beside that of the slowest ``link`` in GB/s.

    A ring sends 2 (N - 1) / N bytes over each link for each byte of the tensor: so many times the tensor's bytes a
    second are the bus bandwidth, which is at best that of the slowest link.
    Source: NVIDIA's nccl-tests, doc/PERFORMANCE.md.
    """
    tensor = torch.zeros(size // 4, device=device)
    seconds = max(gather(median_seconds(lambda: dist.all_reduce(tensor), device)))
    ranks = dist.get_world_size()
    factor = 2 * (ranks - 1) / ranks
    speed = size / seconds / 1e9
    bus = f"x 2(N-1)/N = {factor:.2f}: {speed * factor:.2f} GB/s on the bus, {speed * factor / link:.0%} of a link"
    return Row(f"all-reduce of {size // MIB} MiB", f"{1000 * seconds:.2f} ms, {speed:.2f} GB/s; {bus}")


def neighbours(size: int, device: torch.device) -> tuple[Row, float]:
    """Bandwidth and latency between ranks that are neighbours in a ring, each pair while no other disturbs its ranks.

    Returns:
        A row, and the GB/s of the slowest link.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mine: dict[str, tuple[float, float]] = {}
    for pairs in rounds(ranks):
        chosen = [pair for pair in pairs if rank in pair]
        peer = sum(chosen[0]) - rank if chosen else None
        latency = median_seconds(exchange(1, peer, device), device)
        seconds = median_seconds(exchange(size, peer, device), device)
        if chosen and rank == chosen[0][0]:
            mine[f"{rank} and {peer}"] = (size / seconds / 1e9, latency)
    links = {name: figures for part in gather(mine) for name, figures in part.items()}
    slowest = min(links, key=lambda name: links[name][0])
    speed, latency = links[slowest]
    best = max(figures[0] for figures in links.values())
    found = f"slowest of {len(links)} link(s): ranks {slowest}, {speed:.2f} GB/s each way, {1e6 * latency:.0f} us"
    return Row("point to point", found + (f"; fastest {best:.2f} GB/s" if len(links) > 1 else "")), speed


def rounds(ranks: int) -> list[list[tuple[int, int]]]:
    """Neighbours in a ring, in rounds of pairs that share no rank: two, and a third if the ring has an odd length."""
    pairs = [(left, (left + 1) % ranks) for left in range(ranks if ranks > 2 else 1)]
    last = [pairs.pop()] if ranks % 2 else []
    return [part for part in (pairs[::2], pairs[1::2], last) if part]


def exchange(size: int, peer: int | None, device: torch.device) -> Callable[[], None]:
    """Sends ``size`` bytes to ``peer`` and receives as many from it at the same time; does nothing without a peer."""
    if peer is None:
        return lambda: None
    out, into = torch.zeros(size, dtype=torch.uint8, device=device), torch.empty(size, dtype=torch.uint8, device=device)
    return lambda: swap(out, into, peer)


def swap(out: Tensor, into: Tensor, peer: int) -> None:
    """Send one tensor and receive another."""
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, out, peer), dist.P2POp(dist.irecv, into, peer)]):
        work.wait()
