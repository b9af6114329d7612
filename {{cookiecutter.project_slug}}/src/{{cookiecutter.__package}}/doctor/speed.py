"""How fast the ranks compute, all of them at the same time: ``plan`` takes this speed to estimate a step."""

import time

import torch

from ..runtime import all_gather_object
from .report import Row

WARM_UP, REPEATS = 2, 5


def measure_speed(device: torch.device) -> Row:
    """Measure products of square matrices on every rank; returns the slowest rank's speed. A collective."""
    size = 512 if device.type == "cpu" else 8192
    speeds = []
    for dtype in (torch.float32, torch.bfloat16):
        slowest = max(all_gather_object(seconds_of_product(size, dtype, device)))
        speeds.append(f"{2 * size**3 / slowest / 1e12:.3g} TFLOP/s in {str(dtype).removeprefix('torch.')}")
    return Row("matrix products", f"slowest rank: {', '.join(speeds)}")


def seconds_of_product(size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return how long the product of two (size, size) matrices takes, the fastest of some."""
    matrix, times = torch.ones(size, size, dtype=dtype, device=device), []
    for _ in range(WARM_UP + REPEATS):
        start = time.perf_counter()
        matrix @ matrix
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[WARM_UP:])
