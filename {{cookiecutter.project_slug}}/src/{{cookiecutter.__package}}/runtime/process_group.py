"""The process group: joined at the start, left at the end, and what the ranks do together in between.

find_process           which rank this is (from the launcher), and its device
process_group          init_process_group ... destroy_process_group, around everything else
  on_main              rank 0 does something, every rank gets the result
  all_gather_object    every rank gets the objects of all ranks
  all_gather_numbers   every rank gets the lists of numbers of all ranks, in a fraction of the time
  set_timeout          short waits, once start-up is over
  timeout              long ones, for what takes as long as it takes
"""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..config import DistributedConfig, UserError
from ..launch import ProcessInfo, collective_timeout, find_process_info, first_line, is_port
from .failures import end_failed_rank, report_failures
from .memory import keep_freed_memory

T = TypeVar("T")

# How long ranks wait for each other now, in seconds, and the groups that have a timeout of their own.
WAIT = {"seconds": 0.0}
PATIENT_GROUPS: set[dist.ProcessGroup] = set()


@dataclass(frozen=True, kw_only=True)
class Process(ProcessInfo):
    """This process of the run, and its device."""

    device: torch.device  # Where it computes; the first one if it has several.

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0, which writes the files and prints."""
        return self.rank == 0


@contextmanager
def process_group(config: DistributedConfig, devices_per_rank: int) -> Iterator[Process]:
    """Join the process group for the duration of a ``with`` block, and leave it however the block ends.

    Rejects an environment or settings that do not fit this machine, and a rendezvous at which not all ranks arrive.
    """
    keep_freed_memory()
    process = find_process(config, devices_per_rank)
    backend = choose_backend(config.backend, process.device)
    on_accelerator = process.device.type != "cpu"
    if on_accelerator:
        # Before the first collective: without it, every rank would open a context on the first device.
        torch.accelerator.set_device_index(process.device)
    with rendezvous_errors(process, config.init_method):
        dist.init_process_group(
            backend,
            timeout=collective_timeout(config.startup_timeout_seconds),
            # A process with several devices uses the backend on all of them. For a mesh, PyTorch splits groups that are
            # bound to a device, which fails under gloo.
            device_id=process.device if on_accelerator and devices_per_rank == 1 and backend != "gloo" else None,
            **rendezvous_arguments(config.init_method, process),
        )
    WAIT["seconds"] = config.startup_timeout_seconds
    try:
        with report_failures(lambda: "outside of training"):
            yield process
    except Exception as error:
        if process.world_size > 1:
            end_failed_rank(error)
        raise
    finally:
        dist.destroy_process_group()
        PATIENT_GROUPS.clear()
        # Reference cycles that hold the groups would keep their threads running.
        gc.collect()


def find_process(config: DistributedConfig, devices_per_rank: int) -> Process:
    """Return which process this is, and choose its device."""
    info = find_process_info()
    return Process(**asdict(info), device=choose_device(config, devices_per_rank, info))


def choose_device(config: DistributedConfig, devices_per_rank: int, info: ProcessInfo) -> torch.device:
    """Return the first accelerator of this process, by local rank; the CPU if there is none or if it was requested.

    Rejects more processes than devices.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if config.device == "cpu" or accelerator is None:
        return torch.device("cpu")
    if accelerator.type == "mps" and info.world_size > 1:
        return torch.device("cpu")  # Apple's GPU has no collectives.
    count = torch.accelerator.device_count()
    if info.launcher == "srun" and count == devices_per_rank:
        return torch.device(accelerator.type, 0)  # Slurm may make only a task's own devices visible to it.
    if info.local_world_size * devices_per_rank > count and config.backend != "gloo":
        processes = count // devices_per_rank
        fewer = f"start fewer (NPROC={processes})" if processes else f"use fewer for each (--parallel.devices {count})"
        raise UserError(
            f"{info.local_world_size} process(es) on this machine with {devices_per_rank} device(s) each, but {count} "
            #:: if cookiecutter.__has_stages ::#
            f"device(s): {fewer}, or use the CPU (--distributed.device cpu)"
            #:: else ::#
            f"device(s): {fewer}, use the CPU (--distributed.device cpu), or share the devices "
            "(--distributed.backend gloo)"
            #:: endif ::#
        )
    return torch.device(accelerator.type, info.local_rank * devices_per_rank % count)


def check_devices(config: DistributedConfig, devices_per_rank: int, world_size: int, local_world_size: int) -> None:
    """Reject devices or a backend that the ranks to start on this machine cannot have."""
    info = ProcessInfo(world_size=world_size, local_world_size=local_world_size)
    choose_backend(config.backend, choose_device(config, devices_per_rank, info))


def choose_backend(backend: str, device: torch.device) -> str:
    """Return the communication backend for ``device``; rejects one that this machine or this build of PyTorch lacks.

    ``auto`` is PyTorch's default. On an accelerator, gloo sends what is on the CPU: Python objects, offloaded shards.
    """
    if backend == "auto":
        default = dist.get_default_backend_for_device(device)
        return default if device.type == "cpu" else f"cpu:gloo,{device.type}:{default}"
    #:: if cookiecutter.__has_stages ::#
    if backend == "gloo" and device.type != "cpu":
        raise UserError(
            "distributed.backend is gloo, which sends no stage's output from an accelerator; use auto, or the CPU "
            "(--distributed.device cpu)"
        )
    #:: endif ::#
    if backend == "nccl" and (device.type != "cuda" or not dist.is_nccl_available()):
        raise UserError("distributed.backend is nccl, but this process has no CUDA GPU; use auto or gloo")
    if backend == "mpi" and not dist.is_mpi_available():
        raise UserError("distributed.backend is mpi, but this PyTorch was built without MPI; use auto or gloo")
    return backend


def rendezvous_arguments(init_method: str, process: Process) -> dict[str, Any]:
    """Return the rendezvous as arguments of ``init_process_group``; a lone process needs no address."""
    if init_method == "env://" and process.world_size == 1:
        return {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if init_method == "env://" and process.rendezvous:
        init_method = f"tcp://{process.rendezvous}"
    if init_method == "env://" and not (os.environ.get("MASTER_ADDR") and is_port(os.environ.get("MASTER_PORT", ""))):
        raise UserError("RANK is set, but MASTER_ADDR or MASTER_PORT is not an address and a port; set both")
    if init_method.startswith("tcp://"):
        # The launcher's own store has another address; with this variable, no rank would open one here.
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    return {"init_method": init_method, "rank": process.rank, "world_size": process.world_size}


@contextmanager
def rendezvous_errors(process: Process, init_method: str) -> Iterator[None]:
    """Turn the errors of a rendezvous into one line: the port is in use, or not all ranks arrived in time."""
    try:
        yield
    except dist.DistError as error:
        by_variables = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        where = init_method if init_method != "env://" else process.rendezvous or by_variables
        if "EADDRINUSE" in str(error):
            remedy = "set MASTER_PORT to another" if init_method == "env://" else "give another"
            raise UserError(f"port in use on this machine: {where}; wait for what uses it, or {remedy}") from None
        raise UserError(
            f"rank {process.rank} did not reach the other {process.world_size - 1} at {where}: are all of them "
            f"started, and can this machine reach that address? ({first_line(error)})"
        ) from None


def set_timeout(seconds: float) -> None:
    """Set how long to wait for other ranks from now on, in all existing groups; new ones have PyTorch's default."""
    WAIT["seconds"] = seconds
    for group in dist.distributed_c10d._world.pg_map.keys() - PATIENT_GROUPS:
        dist.distributed_c10d._set_pg_timeout(collective_timeout(seconds), group)


@contextmanager
def timeout(seconds: float) -> Iterator[None]:
    """Wait ``seconds`` for other ranks in a ``with`` block, or as long as otherwise if that is longer."""
    before = WAIT["seconds"]
    set_timeout(max(seconds, before))
    try:
        yield
    finally:
        set_timeout(before)


def new_patient_group(seconds: float) -> Any:
    """Return a group of all ranks on the CPU, which always waits ``seconds``; a collective."""
    group = dist.new_group(backend="gloo", timeout=collective_timeout(seconds))
    PATIENT_GROUPS.add(group)
    return group


def all_gather_object(own: T) -> list[T]:
    """Return the objects of all ranks, in the order of ranks; a collective. They are pickled, so keep them small."""
    if dist.get_world_size() == 1:
        return [own]  # Pickling, and a message to oneself, would take as long as a small step.
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def all_gather_numbers(*own: list[float], device: torch.device) -> list[list[list[float]]]:
    """Return for each of the given lists those of all ranks, in the order of ranks; a collective.

    A list has the same length on every rank; ``device`` is the one that this rank computes on. This is one message,
    without pickling.
    """
    if dist.get_world_size() == 1:
        return [[numbers] for numbers in own]
    values = torch.tensor(list(chain.from_iterable(own)), dtype=torch.float64, device=device)
    everyone = values.new_empty(dist.get_world_size(), len(values))
    dist.all_gather(list(everyone), values)
    return [numbers.tolist() for numbers in everyone.cpu().split(list(map(len, own)), dim=1)]


def on_main(action: Callable[[], T]) -> T:
    """Run ``action`` on rank 0 and return its result on every rank; a collective, so all ranks have to call it.

    The result is pickled, so keep it small. If ``action`` raises a UserError or an OSError, every rank
    raises it as a UserError: no rank waits for one that has given up.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except UserError as error:
            outcome[1] = error
        except OSError as error:
            outcome[1] = UserError(str(error))
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
