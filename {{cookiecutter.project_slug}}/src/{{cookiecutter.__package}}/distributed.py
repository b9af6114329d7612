"""The process group: which rank this is, setup and cleanup, seeds, stop signals."""

import ctypes
import gc
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from .config import Config, UserError

CPU, STOP_SIGNALS = torch.device("cpu"), (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
FILE_TIMEOUT = timedelta(hours=2)  # How long ranks wait for rank 0 to read or write a file.


@dataclass
class Process:
    """This process of the run, its device, and what it reaches the other ranks by."""

    store: Any  # What rank 0 has read or written, stop signals, and why the run failed.
    rank: int  # 0 prints, and writes files.
    world_size: int
    device: torch.device = CPU
    cpu_group: Any = None  # All ranks, for messages that do not wait for the device.
    calls: int = 0  # Of on_main, the same number on all ranks.

    def on_main(self, action: Callable[[], Any]) -> Any:
        """Read or write files on rank 0; every rank gets what ``action`` returns, or its error as a UserError."""
        self.calls += 1
        if self.rank == 0:
            try:
                outcome = action()
            except Exception as error:  # All ranks end, and at once.
                if not isinstance(error, UserError | OSError):
                    traceback.print_exc()
                outcome = UserError(str(error))
            self.store.set(f"main{self.calls}", pickle.dumps(outcome))
        self.store.wait([f"main{self.calls}"], FILE_TIMEOUT)
        if isinstance(outcome := pickle.loads(self.store.get(f"main{self.calls}")), UserError):
            raise outcome
        return outcome

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order."""
        dist.all_gather_object(values := [None] * self.world_size, value, group=self.cpu_group)
        return values


def rendezvous(config: Config) -> Process:
    """Find the other ranks by the launcher's variables, or be alone if there are none."""
    if sys.platform == "linux" and "LOCAL_RANK" in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end when the launcher is killed.
        if os.environ.get("LAUNCHER_PID") not in (None, str(os.getppid())):
            exit_now(1)  # It is gone.
    if "RANK" not in os.environ:
        return Process(dist.HashStore(), 0, 1)
    method, wait = config.distributed.init_method, timedelta(seconds=config.distributed.timeout_seconds)
    if method != "env://":
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # Rank 0 opens the store, not torchrun.
    try:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store, *ranks = next(dist.rendezvous(method, rank, world_size, timeout=wait))
    except (KeyError, ValueError, dist.DistError) as error:
        raise UserError(f"the other ranks are not at RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: {error}") from None
    return Process(dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store), *ranks)


def setup(config: Config, process: Process) -> None:
    """Choose device, backend and algorithms, and join the process group."""
    process.device, backend = choose_device(config)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(exact := config.train.exact)  # And full fp32; else TF32 and whatever is fastest.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = not exact
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 (it has no type)
    # NCCL ends a process that waits too long; before that, the process has to find out, by gloo, for which rank.
    timeout, is_gloo = timedelta(seconds=config.distributed.timeout_seconds), backend == "gloo"
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):  # Of all groups, those of a DeviceMesh too.
        setattr(dist.distributed_c10d, name, timeout if is_gloo else 2 * timeout)
    dist.init_process_group(backend, None, None, process.world_size, process.rank, process.store)
    process.cpu_group = dist.group.WORLD if is_gloo else dist.new_group(backend="gloo", timeout=timeout)


def choose_device(config: Config) -> tuple[torch.device, str]:
    """Return this rank's first accelerator, or the CPU if there is none or it was asked for, and the backend."""
    settings, device = config.distributed, CPU
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if settings.device != "cpu" and accelerator and (accelerator.type != "mps" or "RANK" not in os.environ):
        each = getattr(config.parallel, "devices", 1)  # Several under model parallelism.
        first, available = int(os.environ.get("LOCAL_RANK", "0")) * each, torch.accelerator.device_count()
        if settings.backend == "gloo" and not getattr(config.parallel, "gloo_on_accelerators", False):
            raise UserError("gloo cannot send an accelerator's tensors; add --distributed.device cpu")
        if settings.backend != "gloo" and first + each > available:
            raise UserError(f"{available} device(s) are too few; lower NPROC, or add --distributed.device cpu")
        device = torch.device(accelerator.type, first % available)
        torch.accelerator.set_device_index(device)  # Else every rank opens a context on the first one.
    return device, dist.get_default_backend_for_device(device) if settings.backend == "auto" else settings.backend


def cleanup(process: Process, stopped: bool = False) -> None:
    """Leave the process group, and end the process with exit code 0, or 143 if a signal stopped its work."""
    dist.barrier(group=process.cpu_group)  # Rank 0 may hold the store, which others still read.
    dist.destroy_process_group()
    gc.collect()  # Ends loader processes.
    exit_now(128 + signal.SIGTERM if stopped else 0)


def exit_now(code: int) -> NoReturn:
    """End the process at once: Python would take threads apart that gloo keeps running, and sometimes abort."""
    with suppress(OSError, AttributeError):  # Nobody may read it any more, or it was closed.
        sys.stdout.flush()
    os._exit(code)


def derive_seed(*key: int | str) -> int:
    """Return a hash of ``key``, such as (seed, epoch, index) or (seed, "step", step, rank), as a seed."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "big")


def seed_everything(seed: int, device: torch.device | None = None) -> None:
    """Seed Python, NumPy and PyTorch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    generators: Any = torch.default_generator if device in (None, CPU) else torch  # It takes 0.1 ms to find them all.
    generators.manual_seed(seed)


class StopSignal:
    """Reports SIGTERM, SIGUSR1 or Ctrl-C; a handler must not call a collective, so ranks agree between steps."""

    def __init__(self, process: Process) -> None:
        self.process, self.clock = process, time.monotonic()
        self.steps, self.steps_between = 0, 1  # Since the last check, and from one to the next, 2.5 seconds later.
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: process.store.set("stop", ""))

    def agreed(self, must_check: bool) -> bool:
        """Return after a step whether any rank has received a signal; not all steps are checked."""
        self.steps += 1
        if not must_check and self.steps < self.steps_between:
            return False
        received = self.process.rank == 0 and self.process.store.check(["stop"])
        message = torch.tensor([received, 2.5 * self.steps / max(time.monotonic() - self.clock, 1e-6)])
        dist.barrier(group=self.process.cpu_group)  # Else only some ranks would notice one that hangs.
        dist.broadcast(message, 0, group=self.process.cpu_group)  # A tree: log2(N) messages, one after the other.
        received, self.steps_between = message.tolist()
        self.steps, self.clock = 0, time.monotonic()
        return received > 0
