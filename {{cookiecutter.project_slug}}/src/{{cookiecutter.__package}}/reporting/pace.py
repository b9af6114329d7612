"""How fast a run is, which rank holds the others up, and how much memory they need."""

import time
from pathlib import Path
from typing import Any

import torch


class Pace:
    """Measures steps between two log records, without evaluation and saving.

    All ranks take a step in the same time, because they wait for each other when they exchange gradients. What tells
    them apart is what each does alone, from the end of one exchange on: the optimizer's step, loading the next batch
    and, unless the ranks already wait for each other in it, the first forward. It is the processor's
    time; an accelerator works on its own. What ``sampler`` does alone between steps, such as stepping environments, it
    counts itself, as ``busy_seconds``.
    """

    def __init__(
        self, strategy: Any, samples_per_step: int, device: torch.device, sampler: Any, tokens_per_sample: int = 0
    ) -> None:
        self.samples_per_step, self.device, self.sampler = samples_per_step, device, sampler
        self.tokens_per_sample = tokens_per_sample
        self.waits_in_forward = strategy.waits_in_forward
        self.clock = self.mark = self.alone = self.busy = 0.0
        self.step, self.is_alone = 0, False
        strategy.module.register_forward_hook(lambda *_: self.end_alone())

    def start(self, step: int) -> None:
        """Start counting after ``step``."""
        self.clock = self.mark = time.perf_counter()
        self.step, self.alone, self.is_alone = step, 0.0, True
        self.busy = self.busy_seconds()

    def busy_seconds(self) -> float:
        """Return what the sampler has counted so far."""
        return getattr(self.sampler, "busy_seconds", 0.0)

    def count_alone(self) -> None:
        """Count the time since the last exchange of gradients, or the last call; the forward comes next."""
        if self.is_alone:
            now = time.perf_counter()
            self.alone, self.mark, self.is_alone = self.alone + now - self.mark, now, not self.waits_in_forward

    def end_alone(self) -> None:
        """Count the time of the first forward as well; the other micro-batches are not counted."""
        self.count_alone()
        self.is_alone = False

    def begin_alone(self) -> None:
        """Note that the gradients are exchanged."""
        self.mark, self.is_alone = time.perf_counter(), True

    def count(self) -> list[float]:
        """Return what ``measure`` needs of each rank: the seconds it was alone, and its memory and peak in bytes."""
        since_exchange = time.perf_counter() - self.mark if self.is_alone else 0.0
        alone = self.alone + since_exchange + self.busy_seconds() - self.busy
        return [alone, memory_in_use(self.device), memory_in_use(self.device, peak=True)]

    def measure(self, step: int, counted: list[list[float]]) -> dict[str, float]:
        """Return what to log, of what each rank has counted, and start again.

        ``slowest_rank`` needs ``behind_ms`` more for a step than the fastest; memory is that of the rank with the most.
        """
        steps, seconds = step - self.step, time.perf_counter() - self.clock
        everyone, memory, peak = zip(*counted, strict=True)
        self.start(step)
        record = {"memory_mib": round(max(memory) / 2**20, 1), "peak_memory_mib": round(max(peak) / 2**20, 1)}
        if not steps:
            return record
        if len(everyone) > 1:
            slowest = max(range(len(everyone)), key=everyone.__getitem__)
            record |= {"slowest_rank": slowest, "behind_ms": round(1000 * (max(everyone) - min(everyone)) / steps, 2)}
        return self.throughput(steps, seconds) | record

    def throughput(self, steps: int, seconds: float) -> dict[str, float]:
        """Return the samples per second and, if they consist of tokens, the tokens per second, over all ranks."""
        rate = steps * self.samples_per_step / seconds
        tokens = {"tokens_per_second": round(rate * self.tokens_per_sample, 1)} if self.tokens_per_sample else {}
        return {"samples_per_second": round(rate, 1), **tokens}


def memory_in_use(device: torch.device, *, peak: bool = False) -> int:
    """Return the bytes in use, or the most since ``reset_peak_memory``; on a CPU, of this process (0 if not Linux)."""
    if device.type != "cpu":
        count = torch.accelerator.max_memory_allocated if peak else torch.accelerator.memory_allocated
        return max(map(count, range(torch.accelerator.device_count())))  # A rank may use several.
    path, name = Path("/proc/self/status"), "VmHWM:" if peak else "VmRSS:"
    lines = path.read_text().splitlines() if path.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(name)), 0)


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak, so that the memory that building the model needed does not count."""
    clear = Path("/proc/self/clear_refs")
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()
    elif clear.exists():
        clear.write_text("5")  # proc(5): resets the peak of the resident set.
