"""Measurements between ranks: clocks, point-to-point links between neighbors, and an all-reduce over all ranks."""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..runtime import all_gather_object
from .report import Row

WARM_UP, REPEATS = 2, 5
MIB = 2**20


def measure(world_size: int, device: torch.device) -> list[Row]:
    """Measure everything between the ranks; returns the same rows on each. A collective."""
    if world_size == 1:
        return [Row(name, "only one rank, nothing to measure") for name in ("clocks", "all-reduce", "point to point")]
    # Less on a CPU, where the ranks compute the sums themselves, on shared processors.
    large = (8 if device.type == "cpu" else 64) * MIB
    links, slowest = measure_links(large, device)
    all_reduces = [measure_all_reduce(size, slowest, device) for size in (MIB, large)]
    return [check_clocks(), check_sum(device), links, *all_reduces]


def median_seconds(action: Callable[[], object], device: torch.device) -> float:
    """Return how long ``action`` takes on this rank if all ranks start it together; a collective."""

    def now() -> float:
        if device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    times = []
    for _ in range(WARM_UP + REPEATS):
        dist.barrier()
        start = now()
        action()
        times.append(now() - start)
    return statistics.median(times[WARM_UP:])


def check_clocks() -> Row:
    """Compare the ranks' clocks as they leave a barrier, which is exact to a few milliseconds."""
    stamps = []
    for _ in range(REPEATS):
        dist.barrier()
        stamps.append(time.time())
    everyone = all_gather_object(stamps)
    ahead = [statistics.median(a - b for a, b in zip(own, everyone[0], strict=True)) for own in everyone]
    apart = max(ahead) - min(ahead)
    found = f"{1000 * apart:.1f} ms apart"
    if apart > 1:
        who = f"rank {ahead.index(max(ahead))} is ahead of rank {ahead.index(min(ahead))}"
        return Row("clocks", found, "warn", f"{who}; synchronize them (NTP), or times in logs cannot be compared")
    return Row("clocks", found)


def check_sum(device: torch.device) -> Row:
    """Check that an all-reduce sums correctly: every value of rank r is r + 1, so every sum is N (N + 1) / 2."""
    world_size = dist.get_world_size()
    values = torch.full((1000,), dist.get_rank() + 1.0, device=device)
    dist.all_reduce(values)
    correct = all_gather_object(bool((values == world_size * (world_size + 1) / 2).all()))
    if not all(correct):
        wrong = ", ".join(str(rank) for rank, is_correct in enumerate(correct) if not is_correct)
        return Row("sum over ranks", f"wrong on rank {wrong}", "fail", "do not train on these devices and connections")
    return Row("sum over ranks", f"right on all {world_size}")


def measure_all_reduce(size: int, link: float, device: torch.device) -> Row:
    """Measure an all-reduce of ``size`` bytes, and compare it with the slowest ``link`` in GB/s.

    A ring sends 2 (N - 1) / N bytes over each link for each byte of the tensor. So the bus bandwidth is that many times
    the tensor's bytes per second; at best it equals that of the slowest link.
    Source: NVIDIA's nccl-tests, doc/PERFORMANCE.md.
    """
    tensor = torch.zeros(size // 4, device=device)
    seconds = max(all_gather_object(median_seconds(lambda: dist.all_reduce(tensor), device)))
    world_size = dist.get_world_size()
    factor = 2 * (world_size - 1) / world_size
    speed = size / seconds / 1e9
    bus = f"x 2(N-1)/N = {factor:.2f}: {speed * factor:.2f} GB/s on the bus, {speed * factor / link:.0%} of a link"
    return Row(f"all-reduce of {size // MIB} MiB", f"{1000 * seconds:.2f} ms, {speed:.2f} GB/s; {bus}")


def measure_links(size: int, device: torch.device) -> tuple[Row, float]:
    """Measure bandwidth and latency between neighbors in a ring; returns a row, and the GB/s of the slowest link."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    own: dict[str, tuple[float, float]] = {}
    for pairs in ring_rounds(world_size):
        pair = next((pair for pair in pairs if rank in pair), None)
        peer = sum(pair) - rank if pair else None
        latency = median_seconds(build_exchange(1, peer, device), device)
        seconds = median_seconds(build_exchange(size, peer, device), device)
        if pair and rank == pair[0]:
            own[f"{rank} and {peer}"] = (size / seconds / 1e9, latency)
    links = {name: measured for part in all_gather_object(own) for name, measured in part.items()}
    slowest = min(links, key=lambda name: links[name][0])
    speed, latency = links[slowest]
    fastest = max(measured[0] for measured in links.values())
    found = f"slowest of {len(links)} link(s): ranks {slowest}, {speed:.2f} GB/s each way, {1e6 * latency:.0f} us"
    return Row("point to point", found + (f"; fastest {fastest:.2f} GB/s" if len(links) > 1 else "")), speed


def ring_rounds(world_size: int) -> list[list[tuple[int, int]]]:
    """Return the neighbors in a ring, in rounds of pairs that share no rank: two, or three if the ring is odd."""
    pairs = [(left, (left + 1) % world_size) for left in range(world_size if world_size > 2 else 1)]
    last = [pairs.pop()] if world_size % 2 else []
    return [part for part in (pairs[::2], pairs[1::2], last) if part]


def build_exchange(size: int, peer: int | None, device: torch.device) -> Callable[[], None]:
    """Return a function that exchanges ``size`` bytes with ``peer``; without a peer it does nothing."""
    sent = torch.zeros(size, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)

    def exchange() -> None:
        if peer is not None:
            operations = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

    return exchange
