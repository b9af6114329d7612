"""Who am I (rank, local rank, world size, device), and the process group: set up, watched over, cleaned up.

``place.py`` reads from the environment which process this is; here it gets a device, and meets the others.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from .config import Config, DistributedConfig, UserError
from .lost import lost_ranks_told
from .place import Place, find_place

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class World(Place):
    """The place of this process among all, and its device.

    Attributes:
        device: Where this process computes; the first one, if it has several.
    """

    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that writes files and speaks."""
        return self.rank == 0


@contextmanager
def process_group(settings: Config) -> Iterator[World]:
    """Join the process group for the length of a ``with`` block, and leave it in the end, however that comes.

    Raises:
        UserError: if the environment or the settings do not fit this machine.
    """
    config = settings.distributed
    world = resolve(config, settings.parallel.devices_per_rank())
    backend = choose_backend(config.backend, world.device)
    if world.device.type != "cpu":
        # Before the first collective, or every rank would open a context on the first device.
        torch.accelerator.set_device_index(world.device)
    with meeting_errors(world, config.init_method):
        dist.init_process_group(
            backend,
            timeout=timedelta(seconds=config.startup_timeout_seconds),
            # A process with several devices uses the backend on all of them.
            device_id=world.device if is_single_device(settings, world) else None,
            **rendezvous(config.init_method, world),
        )
    try:
        with lost_ranks_told(lambda: "outside of training"):
            yield world
    finally:
        dist.destroy_process_group()
        # A gloo thread that drops the last reference to a Python object while the interpreter ends aborts the process.
        gc.collect()


def is_single_device(settings: Config, world: World) -> bool:
    """Whether this process computes on one accelerator."""
    return world.device.type != "cpu" and settings.parallel.devices_per_rank() == 1


def resolve(config: DistributedConfig, devices_per_rank: int) -> World:
    """Find this process's place from the environment, and choose its device.

    Raises:
        UserError: if the environment is incomplete, or there are more processes than devices.
    """
    place = find_place()
    return World(**asdict(place), device=choose_device(config, devices_per_rank, place))


def choose_device(config: DistributedConfig, devices_per_rank: int, place: Place) -> torch.device:
    """Accelerators by local rank, the first of this process; the CPU where there is none, or where it was asked for.

    Raises:
        UserError: if there are more processes than devices.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if config.device == "cpu" or accelerator is None:
        return torch.device("cpu")
    if accelerator.type == "mps" and place.size > 1:
        return torch.device("cpu")  # Apple's GPU has no collectives.
    count = torch.accelerator.device_count()
    if place.launcher == "srun" and count == devices_per_rank:
        return torch.device(accelerator.type, 0)  # Slurm may show each task its own devices alone.
    if place.local_size * devices_per_rank > count and config.backend != "gloo":
        raise UserError(
            f"{place.local_size} process(es) on this machine with {devices_per_rank} device(s) each, but {count} "
            f"device(s): start fewer (NPROC={count // devices_per_rank}), use the CPU (--distributed.device cpu), or "
            "share the devices (--distributed.backend gloo)"
        )
    return torch.device(accelerator.type, place.local_rank * devices_per_rank % count)


def choose_backend(backend: str, device: torch.device) -> str:
    """The collective library to use on ``device``; ``auto`` is the one that PyTorch names for it.

    On an accelerator, gloo carries what lies on the CPU: Python objects, and shards that were put there.
    """
    if backend == "auto":
        default = dist.get_default_backend_for_device(device)
        return default if device.type == "cpu" else f"cpu:gloo,{device.type}:{default}"
    if backend == "nccl" and (device.type != "cuda" or not dist.is_nccl_available()):
        raise UserError("distributed.backend is nccl, but this process has no CUDA GPU; use auto or gloo")
    if backend == "mpi" and not dist.is_mpi_available():
        raise UserError("distributed.backend is mpi, but this PyTorch was built without MPI; use auto or gloo")
    return backend


def rendezvous(init_method: str, world: World) -> dict[str, Any]:
    """Where the ranks meet, as arguments of ``init_process_group``; a lone process meets nobody and needs no port."""
    if init_method == "env://" and world.size == 1:
        return {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    if init_method == "env://" and world.meeting:
        init_method = f"tcp://{world.meeting}"
    if init_method.startswith("tcp://"):
        # The launcher's own store is at another place: rank 0 has to open one here, and all would wait for it.
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    return {"init_method": init_method, "rank": world.rank, "world_size": world.size}


@contextmanager
def meeting_errors(world: World, init_method: str) -> Iterator[None]:
    """Tell in one line why the ranks did not meet.

    Raises:
        UserError: if the port is taken, or not all ranks came in time.
    """
    try:
        yield
    except dist.DistError as error:
        where = init_method if init_method != "env://" else world.meeting or master()
        if "EADDRINUSE" in str(error):
            remedy = "set MASTER_PORT to another" if init_method == "env://" else "give another"
            raise UserError(f"port in use on this machine: {where}; wait for what uses it, or {remedy}") from None
        raise UserError(
            f"rank {world.rank} did not meet the other {world.size - 1} at {where}: have all been started, and can "
            f"this machine reach that one? ({next(iter(str(error).splitlines()), '')})"
        ) from None


def master() -> str:
    """Where the launcher's variables say that rank 0 is."""
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def choose_arithmetic(exact: bool) -> None:
    """Whether cuDNN, for training and evaluation alike, keeps full fp32 and gives the same bits each time."""
    torch.backends.cudnn.allow_tf32 = not exact
    torch.backends.cudnn.deterministic = exact


def shorten_timeout(config: DistributedConfig) -> None:
    """From here on wait only ``timeout_seconds`` for other ranks: start-up is over, and who is late now is lost."""
    for group in dist.distributed_c10d._world.pg_map:  # All that this rank is in, those of a mesh too.
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=config.timeout_seconds), group)


def on_main(action: Callable[[], T], world: World) -> T:
    """Run ``action`` on rank 0 and give its result to every rank; a collective, so all ranks have to call it.

    The result travels by pickle, so it should be small.

    Raises:
        UserError: on every rank, if ``action`` raised it on rank 0: no rank is left waiting for one that gave up.
    """
    outcome: list[Any] = [None, None]
    if world.is_main:
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


def seed_rank(seed: int, rank: int) -> None:
    """Give each rank random numbers of its own, for what may differ between ranks (dropout, say).

    Weights are drawn before this call, from the same seed everywhere; augmentation is seeded by sample.
    """
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)


def get_rng_state(device: torch.device) -> dict[str, Any]:
    """State of this rank's random number generators, in types that ``torch.load(weights_only=True)`` reads."""
    numpy_state: Any = np.random.get_state()
    name, keys, *rest = numpy_state
    state = {"python": random.getstate(), "numpy": (name, keys.tolist(), *rest), "torch": torch.get_rng_state()}
    if device.type != "cpu":
        state["accelerator"] = torch.get_device_module(device).get_rng_state()
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Put back what ``get_rng_state`` gave."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type != "cpu" and "accelerator" in state:
        torch.get_device_module(device).set_rng_state(state["accelerator"])
