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
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from .config import Config, UserError

T = TypeVar("T")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
CHECK_SECONDS = 1.0  # Time between two checks for stop signals, while no record is due.
REPORT_SECONDS = 3.0  # How long a rank that waited in vain looks for the reports of others.
MAIN_TIMEOUT = timedelta(hours=2)  # How long ranks wait for rank 0 to read or write a file.
PR_SET_PDEATHSIG = 1  # From <linux/prctl.h>.


@dataclass(frozen=True)
class Process:
    """This process of the run: its rank, its device, and what it reaches the other ranks by.

    Attributes:
        cpu_group: All ranks, for messages between CPUs, which do not wait for the device.
        main_group: All ranks, while they wait for files of rank 0.
        store: Holds what ended each rank that failed.
    """

    rank: int
    world_size: int
    device: torch.device
    cpu_group: Any
    main_group: Any
    store: dist.Store

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0, which prints and writes files."""
        return self.rank == 0

    def on_main(self, action: Callable[[], T]) -> T:
        """Run ``action`` on rank 0 and return its result on every rank; an error of it is a UserError on all ranks."""
        outcome: list[Any] = [None, None]
        if self.is_main:
            try:
                outcome[0] = action()
            except (UserError, OSError, RuntimeError) as error:  # torch.save raises the last one on a full disk.
                outcome[1] = str(error)
        dist.broadcast_object_list(outcome, src=0, group=self.main_group)
        if outcome[1] is not None:
            raise UserError(outcome[1])
        result: T = outcome[0]
        return result

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.cpu_group)
        return values


def setup(config: Config) -> Process:
    """Choose the device, and join the process group with the launcher's variables, or alone if there are none."""
    end_with_launcher()
    devices = config.parallel.devices_per_rank()
    device = choose_device(config.distributed.device, config.distributed.backend, devices)
    set_arithmetic(config.train.exact)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)  # Otherwise every rank opens a context on the first device.
    backend = None if config.distributed.backend == "auto" else config.distributed.backend
    if backend == "mpi" and not dist.is_mpi_available():
        raise UserError("distributed.backend is mpi, which this build of PyTorch lacks; use gloo or nccl")
    timeout = timedelta(seconds=config.distributed.timeout_seconds)
    store, rank, world_size = find_ranks(config.distributed.init_method, timeout)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type != "cpu" and backend != "gloo" else None,
    )
    # All groups are made now, while all ranks are here.
    cpu_group = dist.new_group(backend="gloo", timeout=timeout)
    main_group = dist.new_group(backend="gloo", timeout=MAIN_TIMEOUT)
    reports = dist.PrefixStore(f"reports/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return Process(rank, world_size, device, cpu_group, main_group, reports)


def cleanup() -> None:
    """Leave the process group, and end the process.

    Python's own end would take threads apart that gloo and DTensor's caches keep running, and sometimes abort.
    """
    dist.destroy_process_group()
    gc.collect()
    exit_now(0)


def find_ranks(init_method: str, timeout: timedelta) -> tuple[Any, int, int]:
    """Return a store that all ranks reach, the rank of this process, and the number of ranks."""
    if "RANK" not in os.environ:
        return dist.HashStore(), 0, 1
    if init_method == "env://":
        found: tuple[Any, int, int] = next(dist.rendezvous(init_method, timeout=timeout))
        return found
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # Rank 0, not torchrun, opens the store of another method.
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return next(dist.rendezvous(init_method, rank, world_size, timeout=timeout))


def choose_device(name: str, backend: str, count: int) -> torch.device:
    """Return the first of this local rank's ``count`` accelerators; the CPU if there is none or it was asked for."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "cpu" or accelerator is None or (accelerator.type == "mps" and "RANK" in os.environ):
        return torch.device("cpu")
    first, available = int(os.environ.get("LOCAL_RANK", "0")) * count, torch.accelerator.device_count()
    if first + count > available and backend != "gloo":
        raise UserError(
            f"this rank needs {count} device(s) from number {first} on, but there are {available}: start "
            f"{available // count} rank(s) (NPROC), use the CPU (--distributed.device cpu), or share the devices "
            "(--distributed.backend gloo)"
        )
    return torch.device(accelerator.type, first % available)


def set_arithmetic(exact: bool) -> None:
    """Choose between deterministic algorithms in full fp32, and TF32 and whatever is fastest."""
    if exact:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not exact
    torch.backends.cudnn.deterministic = exact
    torch.use_deterministic_algorithms(exact, warn_only=True)  # Some operations have no deterministic algorithm.
    torch.utils.deterministic.fill_uninitialized_memory = False  # It would cost time, and hide nothing here.


def end_with_launcher() -> None:
    """On Linux, make this rank end with its launcher, even if that is killed: it would keep its GPU and its files."""
    if sys.platform == "linux" and "LOCAL_RANK" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def derive_seed(*key: int | str) -> int:
    """Return a hash of ``key``, such as (seed, epoch, index) or (seed, "step", step, rank), as a seed."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "big")


def seed_everything(seed: int, device: torch.device | None = None) -> None:
    """Seed Python, NumPy and PyTorch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 0.1 ms: it also looks for every accelerator.
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


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
        """Return after a step whether any rank has received a signal.

        Ranks check if ``must_check``, which is the same on all ranks, and about every ``CHECK_SECONDS``; without
        waiting for their devices.
        """
        self.steps += 1
        if not must_check and self.steps < self.steps_between:
            return False
        seconds_per_step = (time.monotonic() - self.clock) / self.steps
        message = torch.tensor([float(self.received), seconds_per_step])
        dist.all_reduce(message, dist.ReduceOp.MAX, group=self.process.cpu_group)
        received, slowest = message.tolist()
        self.steps_between = max(1, int(CHECK_SECONDS / max(slowest, 1e-6)))
        self.steps, self.clock = 0, time.monotonic()
        return received > 0


def fail(error: Exception, process: Process) -> NoReturn:
    """Print what ended this rank, share it with the other ranks, and end the process.

    Of a rank that waited for others in vain, the line says which of them failed or are silent. What all ranks raise
    alike is printed by rank 0 alone.
    """
    waited = isinstance(error, RuntimeError) and re.search("gloo|NCCL|collective|[Cc]onnection", str(error))
    text, is_user_error = " ".join(f"{type(error).__name__}: {error}".split()), isinstance(error, UserError)
    reports = exchange_reports("" if waited else text, process, REPORT_SECONDS if waited or process.rank else 0)
    failed = [f"rank {rank} failed with {reports[rank]}" for rank in sorted(reports) if reports[rank]]
    silent = [str(rank) for rank in range(process.world_size) if rank not in reports]
    if waited:
        silence = f"no report from rank(s) {', '.join(silent) or 'none'}, which died, hang or are late ({text[:200]})"
        print(f"error: rank {process.rank} waited in vain: {'; '.join(failed) or silence}", file=sys.stderr)
    elif process.rank and reports.get(0) == text:
        pass  # Rank 0 prints the same.
    elif is_user_error:
        print(text.replace("UserError", "error", 1), file=sys.stderr)
    else:
        traceback.print_exception(error)
    exit_now(2 if is_user_error else 1)


def exchange_reports(text: str, process: Process, seconds: float) -> dict[int, str]:
    """Report what ended this rank, and return the reports by rank that arrive before one of another names an error."""
    reports: dict[int, str] = {}
    with suppress(RuntimeError):  # The store may be gone, with the launcher.
        process.store.set(str(process.rank), text)
        deadline = time.monotonic() + seconds
        while len(reports) < process.world_size:
            for rank in range(process.world_size):
                if rank not in reports and process.store.check([str(rank)]):
                    reports[rank] = process.store.get(str(rank)).decode()
            if time.monotonic() > deadline or any(reports[rank] for rank in reports if rank != process.rank):
                break
            time.sleep(0.1)
    return reports


def exit_now(code: int) -> NoReturn:
    """End the process with ``code`` at once, after writing out what was printed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
