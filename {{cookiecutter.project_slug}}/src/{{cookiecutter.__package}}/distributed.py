"""The process group: which rank this is, setup and cleanup, device, seeds, stop signals."""

import ctypes
import gc
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .config import Config, UserError

CPU = torch.device("cpu")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
FILE_SECONDS = 7200  # How long ranks wait for rank 0 to read or write a file.
CHECK_SECONDS = 2.5  # How often ranks ask for stop signals.


@dataclass
class Process:
    """This process of the run, its device, and how it reaches the other ranks."""

    store: Any  # Keys and values for all ranks: what rank 0 has read, and why the run failed.
    rank: int  # Rank 0 prints, and writes files.
    world_size: int
    device: torch.device = CPU
    cpu_group: Any = None  # A gloo group of all ranks, whose messages do not wait for the device.
    num_calls: int = 0  # The number of calls of on_main, the same on all ranks.
    # A thread writes checkpoints while training continues. A failed run waits for it, too.
    writer = ThreadPoolExecutor(1)

    def on_main(self, action: Callable[[], Any]) -> Any:
        """Read or write files on rank 0; all ranks get the result, by JSON, or an error."""
        self.num_calls += 1
        answer = ""
        pending = ThreadPoolExecutor(1).submit(answer_with, action) if self.rank == 0 else None
        # Large files take long: rank 0 sets a key each second, empty until it has the answer.
        for second in range(FILE_SECONDS):
            key = f"main{self.num_calls}/{second}"
            if pending:
                with suppress(TimeoutError):
                    answer = pending.result(1)
                self.store.set(key, answer)
            answer = self.store.get(key).decode()  # This waits.
            if answer:
                break
        if not answer:
            raise UserError(f"rank 0 has read or written for {FILE_SECONDS} s; is the disk alive?")
        content = json.loads(answer)
        if "error" in content:
            raise UserError(content["error"])
        return content["result"]

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order."""
        values = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.cpu_group)
        return values


def answer_with(action: Callable[[], Any]) -> str:
    """Return what an action returns, or why it fails, as JSON."""
    try:
        return json.dumps({"result": action()})
    except Exception as error:
        # All ranks have to end, whatever the error is; one that nobody expects is a bug.
        if not isinstance(error, UserError | OSError):
            traceback.print_exc()
        return json.dumps({"error": str(error)})


def rendezvous(config: Config) -> Process:
    """Find the other ranks by the launcher's environment variables, or be alone without them."""
    if sys.platform == "linux" and "LOCAL_RANK" in os.environ:
        end_with_launcher()
    if "RANK" not in os.environ:
        return Process(dist.HashStore(), rank=0, world_size=1)
    init_method = config.distributed.init_method
    timeout = timedelta(seconds=config.distributed.timeout_seconds)
    if init_method != "env://":
        # This variable makes all ranks clients of torchrun's store, which is not at init_method.
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    try:
        rank = int(os.environ["RANK"])
        world_size = int(os.environ["WORLD_SIZE"])
        store, rank, world_size = next(
            dist.rendezvous(init_method, rank, world_size, timeout=timeout)
        )
    except (KeyError, ValueError, dist.DistError) as error:
        raise UserError(f"RANK, WORLD_SIZE, MASTER_ADDR or MASTER_PORT is wrong: {error}") from None
    # Ranks that torchrun starts again get the same store. A prefix hides the keys of before.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Process(dist.PrefixStore(attempt, store), rank, world_size)


def end_with_launcher() -> None:
    """Let Linux kill this process when its launcher ends, even if that is killed itself."""
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG in linux/prctl.h.
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    # A launcher that ended before this call sends no signal, but this process has another parent.
    parent = str(os.getppid())
    if os.environ.get("LAUNCHER_PID", parent) != parent:
        exit_now(1)


def setup(config: Config, process: Process) -> None:
    """Choose device, backend and algorithms, and join the process group."""
    process.device = choose_device(config)
    backend: str = config.distributed.backend
    if backend == "auto":
        backend = dist.get_default_backend_for_device(process.device)
    choose_algorithms(config.train.exact)
    timeout = timedelta(seconds=config.distributed.timeout_seconds)
    # NCCL ends a process that waits too long, before Python can print anything. So the gloo group,
    # where ranks meet before they wait for the device, gives up first: failures.py says for whom.
    group_timeout = timeout if backend == "gloo" else 2 * timeout
    # PyTorch reads these for every new group: those of init_device_mesh are given no timeout.
    distributed_c10d.default_pg_timeout = group_timeout
    distributed_c10d.default_pg_nccl_timeout = group_timeout
    dist.init_process_group(
        backend, store=process.store, rank=process.rank, world_size=process.world_size
    )
    if backend == "gloo":
        # One more gloo group would open a connection to each of the other ranks.
        process.cpu_group = dist.group.WORLD
    else:
        process.cpu_group = dist.new_group(backend="gloo", timeout=timeout)


def choose_device(config: Config) -> torch.device:
    """Return this rank's first accelerator, or the CPU if there is none or it was asked for."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or config.distributed.device == "cpu":
        return CPU
    if accelerator.type == "mps" and "RANK" in os.environ:
        return CPU  # No backend sends tensors of Apple's GPU.
    devices_per_rank = getattr(config.parallel, "devices", 1)  # Some strategies use several.
    first_device = int(os.environ.get("LOCAL_RANK", "0")) * devices_per_rank
    num_devices = torch.accelerator.device_count()
    if config.distributed.backend == "gloo":
        if not getattr(config.parallel, "gloo_on_accelerators", False):
            raise UserError("gloo sends no tensors of an accelerator; add --distributed.device cpu")
        first_device %= num_devices  # Ranks may share a device under gloo. NCCL refuses that.
    elif first_device + devices_per_rank > num_devices:
        raise UserError(f"only {num_devices} devices; lower NPROC, or add --distributed.device cpu")
    device = torch.device(accelerator.type, first_device)
    # Otherwise, every rank would open a context on the first device, which takes memory there.
    torch.accelerator.set_device_index(device)
    return device


def choose_algorithms(exact: bool) -> None:
    """Choose deterministic algorithms and full fp32 if ``exact``, else the fastest, and TF32."""
    # cuBLAS reads the size of its workspaces here, which it needs to be deterministic.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(exact)
    # PyTorch would then also fill all new memory, which takes time.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 (mypy)
    torch.backends.cuda.matmul.allow_tf32 = not exact
    torch.backends.cudnn.allow_tf32 = not exact
    torch.backends.cudnn.benchmark = not exact  # A benchmark may choose others in every run.


def wide_dtype() -> torch.dtype:
    """Return the type of losses and norms: fp32, or fp64 where it is the default type."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


def cleanup(process: Process, stopped: bool = False) -> None:
    """Leave the process group, and end the process: exit code 0, or 130 or 143 after a stop."""
    code = int(process.store.get("stop")) if stopped else 0
    dist.barrier(group=process.cpu_group)  # Rank 0 may hold the store, which others still read.
    dist.destroy_process_group()
    gc.collect()  # Loader processes end when nothing refers to their loader.
    exit_now(code)


def exit_now(code: int) -> NoReturn:
    """End the process at once; Python would first delete objects that threads of gloo use."""
    with suppress(OSError, AttributeError):  # The output may be closed, or read by nobody.
        sys.stdout.flush()
    os._exit(code)


def derive_seed(*key: int | str) -> int:
    """Return a hash of ``key`` as a seed, such as (seed, epoch, index) or (seed, "step", step)."""
    digest = blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def seed_everything(seed: int, device: torch.device = CPU) -> None:
    """Seed Python, NumPy and PyTorch, on the CPU and, if given, on an accelerator."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if device == CPU:
        # The function below takes 0.1 ms to look for accelerators, and this runs for each sample.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


class StopSignal:
    """Receives SIGTERM, SIGUSR1 and Ctrl-C, so that all ranks stop after the same step."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.last_check = time.monotonic()
        self.steps_since_check = 0
        self.steps_between_checks = 1
        for number in STOP_SIGNALS:
            signal.signal(number, self.receive)

    def receive(self, number: int, _: object) -> None:
        """Handle a signal. A handler must not call a collective, which it may interrupt."""
        # A shell learns by these codes whether Ctrl-C or a scheduler ended a command.
        self.process.store.set("stop", "130" if number == signal.SIGINT else "143")

    def agreed(self, must_check: bool) -> bool:
        """Return after a step, on all ranks, whether any rank is known to have got a signal."""
        # A check costs messages, and clocks differ: rank 0 makes CHECK_SECONDS a number of steps.
        self.steps_since_check += 1
        if not must_check and self.steps_since_check < self.steps_between_checks:
            return False
        received = self.process.rank == 0 and self.process.store.check(["stop"])
        seconds = time.monotonic() - self.last_check
        steps_until_check = CHECK_SECONDS * self.steps_since_check / seconds
        # Rank 0 does not wait in a broadcast: only a barrier times out on all ranks if one hangs.
        dist.barrier(group=self.process.cpu_group)
        decision = torch.tensor([float(received), steps_until_check])
        dist.broadcast(decision, 0, group=self.process.cpu_group)
        received, self.steps_between_checks = decision.tolist()
        self.steps_since_check = 0
        self.last_check = time.monotonic()
        return received > 0
