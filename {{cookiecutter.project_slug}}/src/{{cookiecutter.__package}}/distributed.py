"""The process group: which rank this is, setup and cleanup, seeds, stop signals, and which rank failed."""

import ctypes
import gc
import os
import random
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from threading import Thread
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from .config import Config, UserError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
CHECK_SECONDS = 1.0  # Time between two checks for stop signals, while no record is due.
REPORT_SECONDS = 3.0  # How long a rank that failed looks for the reports of others.
MAIN_TIMEOUT = timedelta(hours=2)  # How long ranks wait for rank 0 to read or write a file.


@dataclass(frozen=True)
class Process:
    """This process of the run, its device, and what it reaches the other ranks by."""

    rank: int  # 0 prints, and writes files.
    world_size: int
    device: torch.device
    cpu_group: Any  # All ranks, for messages that do not wait for the device.
    main_group: Any  # All ranks, while they wait until rank 0 has read or written a file.
    store: dist.Store  # What ended each rank that failed, by rank.

    def on_main(self, action: Callable[[], Any]) -> Any:
        """Run ``action`` on rank 0 and return its result on every rank; its error is a UserError on every rank."""
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = action()
            except (UserError, OSError) as error:
                outcome[1] = str(error)
        dist.broadcast_object_list(outcome, src=0, group=self.main_group)
        if outcome[1] is not None:
            raise UserError(outcome[1])
        return outcome[0]

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.cpu_group)
        return values


def setup(config: Config) -> Process:
    """Choose the device, and join the process group with the launcher's variables, or alone if there are none."""
    if sys.platform == "linux" and "LOCAL_RANK" in os.environ:
        # End with the launcher, even if that is killed: a rank that remains would keep its GPU and its files.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.environ.get("LAUNCHER_PID") not in (None, str(os.getppid())):
            exit_now(1)  # It was killed before.
    settings = config.distributed
    count = getattr(config.parallel, "devices", 1)  # Several under model parallelism.
    device = choose_device(settings.device, settings.backend, count)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)  # Otherwise every rank opens a context on the first device.
    # Deterministic algorithms, where there are any, in full fp32; otherwise TF32 and whatever is fastest.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not config.train.exact
    torch.use_deterministic_algorithms(config.train.exact, warn_only=True)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 (it has no type)
    if settings.backend == "mpi" and not dist.is_mpi_available():
        raise UserError("distributed.backend is mpi, which this build of PyTorch lacks; use gloo or nccl")
    timeout = timedelta(seconds=settings.timeout_seconds)
    store, rank, world_size = find_ranks(settings.init_method, timeout)
    dist.init_process_group(
        None if settings.backend == "auto" else settings.backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type != "cpu" and settings.backend != "gloo" and count == 1 else None,
    )
    cpu_group = dist.new_group(backend="gloo", timeout=timeout)
    main_group = dist.new_group(backend="gloo", timeout=MAIN_TIMEOUT)
    return Process(rank, world_size, device, cpu_group, main_group, dist.PrefixStore("reports", store))


def cleanup(stopped: bool = False) -> None:
    """Leave the process group, and end the process with exit code 0, or 143 if a signal stopped its work."""
    dist.destroy_process_group()
    gc.collect()  # Ends loader processes.
    exit_now(128 + signal.SIGTERM if stopped else 0)


def exit_now(code: int) -> NoReturn:
    """End the process at once: Python would take threads apart that gloo keeps running, and sometimes abort."""
    with suppress(OSError):  # Nobody may read them any more.
        sys.stdout.flush()
    os._exit(code)


def find_ranks(init_method: str, timeout: timedelta) -> tuple[Any, int, int]:
    """Return a store that all ranks reach, the rank of this process, and the number of ranks."""
    if "RANK" not in os.environ:
        return dist.HashStore(), 0, 1
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if init_method != "env://":
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # Rank 0 opens the store, not torchrun.
    store, rank, world_size = next(dist.rendezvous(init_method, rank, world_size, timeout=timeout))
    return dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store), rank, world_size


def choose_device(name: str, backend: str, count: int) -> torch.device:
    """Return the first of this local rank's ``count`` accelerators; the CPU if there is none or it was asked for."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "cpu" or accelerator is None or (accelerator.type == "mps" and "RANK" in os.environ):
        return torch.device("cpu")
    first, available = int(os.environ.get("LOCAL_RANK", "0")) * count, torch.accelerator.device_count()
    if first + count > available and backend != "gloo":
        raise UserError(f"{available} device(s) are too few: lower NPROC, or share them (--distributed.backend gloo)")
    return torch.device(accelerator.type, first % available)


def derive_seed(*key: int | str) -> int:
    """Return a hash of ``key``, such as (seed, epoch, index) or (seed, "step", step, rank), as a seed."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "big")


def seed_everything(seed: int, device: torch.device | None = None) -> None:
    """Seed Python, NumPy and PyTorch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 0.1 ms: it also looks for every accelerator.
    if device is not None and device.type != "cpu":
        torch.manual_seed(seed)


class StopSignal:
    """Remembers SIGTERM, SIGUSR1 or Ctrl-C; a handler must not call a collective, so ranks agree between steps."""

    def __init__(self, process: Process) -> None:
        self.process, self.received, self.clock = process, False, time.monotonic()
        self.steps, self.steps_between = 0, 1  # Since the last check, and from one check to the next.
        for number in STOP_SIGNALS:
            signal.signal(number, self.on_signal)

    def on_signal(self, number: int, frame: object) -> None:
        """Remember the signal."""
        self.received = True

    def agreed(self, must_check: bool) -> bool:
        """Return after a step whether any rank has received a signal; not all steps are checked."""
        self.steps += 1
        if not must_check and self.steps < self.steps_between:
            return False
        message = torch.tensor([float(self.received), (time.monotonic() - self.clock) / self.steps])
        dist.all_reduce(message, dist.ReduceOp.MAX, group=self.process.cpu_group)
        received, seconds_per_step = message.tolist()
        self.steps_between = max(1, int(CHECK_SECONDS / max(seconds_per_step, 1e-6)))
        self.steps, self.clock = 0, time.monotonic()
        return received > 0


def fail(error: Exception, process: Process) -> NoReturn:
    """End this process, and print why: which ranks failed or are silent, or an error, unless rank 0 prints the same."""
    waited = isinstance(error, RuntimeError) and re.search("gloo|NCCL|collective|[Cc]onnection|timeout", str(error))
    text, does_not_fit = " ".join(f"{type(error).__name__}: {error}".split()), "loading state_dict" in str(error)
    reports = {process.rank: "" if waited else text}
    thread = Thread(target=exchange_reports, args=(reports, process), daemon=True)
    thread.start()
    thread.join(2 * REPORT_SECONDS)  # The store answers nothing if the link to it is cut.
    code = 2 if does_not_fit or any(report.startswith("UserError") for report in reports.values()) else 1
    failed = [f"rank {rank} failed with {report}" for rank, report in sorted(reports.items()) if report]
    silent = ", ".join(str(rank) for rank in range(process.world_size) if rank not in reports)
    if waited and (failed or silent):
        reason = "; ".join(failed) or f"no report from rank(s) {silent}, which died, hang or are late ({text[:200]})"
        print(f"error: rank {process.rank} waited in vain: {reason}", file=sys.stderr)
    elif process.rank and (reports.get(0) == text or (does_not_fit and reports.get(0))):
        exit_now(code)
    elif code == 2:
        print(f"error: {text.removeprefix('UserError: ')[:2000]}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    exit_now(code)


def exchange_reports(reports: dict[int, str], process: Process) -> None:
    """Report what ended this rank, and add other reports, until there is that of rank 0 or of one that failed."""
    text, deadline = reports[process.rank], time.monotonic() + REPORT_SECONDS
    with suppress(RuntimeError):  # The store may be gone, with the launcher.
        process.store.set(str(process.rank), text)
        while (process.rank or not text) and time.monotonic() < deadline:  # Rank 0 prints its own error at once.
            others = [rank for rank in range(process.world_size) if process.store.check([str(rank)])]
            reports |= {rank: process.store.get(str(rank)).decode() for rank in others}
            if len(reports) == process.world_size or (0 in reports if text else any(reports.values())):
                break
            time.sleep(0.1)
