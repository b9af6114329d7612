"""Looks at this process and its machine: versions, devices, limits, and the disk of ``run.dir``."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import resource
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from .config import Config, UserError, to_dict
from .distributed import World
from .findings import Row
from .model import build_model
from .rundir import lock

MIB, GIB = 2**20, 2**30
# The size of /dev/shm that many systems give where nobody asked for more; loader processes and NCCL soon fill it.
SMALL_SHM = 64 * MIB
# What NVIDIA asks for (NCCL user guide, "Memory issues").
GOOD_SHM = GIB
# Linux gives a process 1024 open files by default; NCCL may need thousands at scale (its user guide, same chapter).
GOOD_FILES = 1024
PROBE = 32 * MIB


def versions() -> Row:
    """The libraries of this rank, which have to be the same on all."""
    found = [f"Python {platform.python_version()}", f"PyTorch {torch.__version__}"]
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        found.append("NCCL " + ".".join(map(str, torch.cuda.nccl.version())))
    return Row("versions", ", ".join(found))


def project(config: Config) -> Row:
    """Fingerprints of this package and of the settings, which have to be the same on all ranks."""
    sources = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        sources.update(path.read_bytes())
    settings = hashlib.sha256(json.dumps(to_dict(config), sort_keys=True).encode())
    return Row("project", f"code {sources.hexdigest()[:8]}, settings {settings.hexdigest()[:8]}")


def query_driver(*words: str) -> list[list[str]]:
    """What NVIDIA's tool says of the devices, a list of fields a line; nothing where there is no such tool."""
    try:
        command = ["nvidia-smi", *words, "--format=csv,noheader,nounits"]
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [[field.strip() for field in line.split(",")] for line in output.splitlines() if line.strip()]


def driver() -> Row:
    """The driver of this machine's NVIDIA GPUs."""
    found = sorted({version for (version,) in query_driver("--query-gpu=driver_version")})
    return Row("driver", "NVIDIA " + ", ".join(found) if found else "none")


def devices(world: World, count: int) -> list[Row]:
    """The ``count`` devices of this rank: memory, and other processes that hold some of it."""
    if world.device.type == "cpu":
        return [processors(world)]
    if world.device.type != "cuda":
        return [Row("device", str(world.device))]
    # Asked before this process touches a device: from then on it would be among the holders.
    holders = query_driver("--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
    first = world.device.index or 0
    return [graphics_card(index, holders) for index in range(first, min(first + count, torch.cuda.device_count()))]


def processors(world: World) -> Row:
    """Threads of the ranks, beside the processors that they may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    found = f"cpu, {usable} processor(s), {world.local_size} rank(s) on this machine with {threads} thread(s) each"
    if threads > 1 and threads * world.local_size > usable:
        return Row("device", found, "warn", f"set OMP_NUM_THREADS={max(1, usable // world.local_size)}")
    return Row("device", found)


def graphics_card(index: int, holders: list[list[str]]) -> Row:
    """One NVIDIA GPU."""
    card = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    others = [
        f"process {pid} ({Path(name).name}, {memory} MiB)"
        for uuid, pid, name, memory in holders
        if uuid.removeprefix("GPU-") == str(card.uuid).removeprefix("GPU-") and pid != str(os.getpid())
    ]
    found = f"cuda:{index} {card.name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if others:
        found += ", held by " + ", ".join(others)
    if free < total / 10:
        return Row("device", found, "fail", "end what holds its memory, or choose others with CUDA_VISIBLE_DEVICES")
    if others or free < total / 2:
        return Row("device", found, "warn", "it has to share its memory and its time with others")
    return Row("device", found)


def shared_memory(config: Config, world: World) -> Row:
    """Space in ``/dev/shm``, through which loader processes hand over batches, and NCCL data within a machine."""
    name, folder = "/dev/shm", Path("/dev/shm")
    if not folder.is_dir():
        return Row(name, "none")
    space = os.statvfs(folder)
    size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    found = f"{free / MIB:.0f} of {size / MIB:.0f} MiB free"
    users = ["loader processes"] if config.data.num_workers else []
    if world.device.type == "cuda" and world.local_size > 1:
        users.append("NCCL")
    advice = "give it 1 GiB or more: mount -o remount,size=1g /dev/shm" if size < GOOD_SHM else "remove old files there"
    if users and free <= SMALL_SHM:
        return Row(name, found, "fail", f"too little for {' and '.join(users)}; {advice}")
    if free <= SMALL_SHM or (users and free < GOOD_SHM):
        return Row(name, found, "warn", f"little for loader processes and NCCL; {advice}")
    return Row(name, found)


def open_files(config: Config, world: World) -> Row:
    """The limit of open files. A rank has a connection to every other one in each process group, and loader processes
    take about twenty each (measured: with two of them a rank dies at 40)."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return Row("open files", "no limit")
    needed = 24 + 4 * world.size + 16 * config.data.num_workers
    good = max(GOOD_FILES, 2 * needed)
    remedy = f"ulimit -n {good}"
    if hard != resource.RLIM_INFINITY and hard < good:
        remedy = f"have the administrator raise the hard limit from {hard} to {good}"
    if limit < needed:
        return Row("open files", f"{limit} at most", "fail", f"this run needs {needed}; {remedy}")
    if limit < good:
        return Row("open files", f"{limit} at most", "warn", f"many ranks or loader processes need more; {remedy}")
    return Row("open files", f"{limit} at most")


def checkpoint_bytes(config: Config) -> int:
    """Bytes of a checkpoint: 12 a parameter, for the weight in fp32 and AdamW's two moments."""
    with torch.device("meta"):
        return 12 * sum(parameter.numel() for parameter in build_model(config.model).parameters())


def run_directory(config: Config) -> list[Row]:
    """Whether ``run.dir`` can be written and is free, and how much fits there how fast. Leaves nothing behind."""
    folder = Path(config.run.dir).absolute()
    place = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    one = checkpoint_bytes(config)
    try:
        free = shutil.disk_usage(place).free
        speed = write_speed(place, min(PROBE, free // 2))
        if os.path.exists(folder / ".lock"):
            lock(folder, patience=0)
    except UserError as error:
        return [Row("run.dir", str(error), "fail")]
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return [Row("run.dir", f"cannot write in {place}: {error.strerror}", "fail", "give another run.dir")]
        free, speed = 0, 0.0
    return [Row("run.dir", f"{place} can be written"), disk(config, free, speed, one)]


def disk(config: Config, free: int, speed: float, one: int) -> Row:
    """Space and speed beside what checkpoints of ``one`` bytes need."""
    wanted = config.checkpoint.keep + 2  # The newest, the best, and the one that is being written.
    room = f"{free / GIB:.1f} GiB" if free >= GIB else f"{free / MIB:.1f} MiB"
    found = f"{room} free, {speed / MIB:.0f} MiB/s; a checkpoint has {one / MIB:.1f} MiB"
    if free < 2 * one:
        return Row("disk", found, "fail", "make room for two checkpoints at least, or give another run.dir")
    if free < wanted * one:
        return Row("disk", found, "warn", f"make room for {wanted} checkpoints (checkpoint.keep, the best, a new one)")
    if speed and one / speed > config.distributed.timeout_seconds:
        return Row("disk", found, "warn", "a save may take longer than distributed.timeout_seconds; raise that")
    return Row("disk", found)


def write_speed(folder: Path, size: int) -> float:
    """Bytes a second that reach the disk, from ``size`` bytes in a file that has no name and so cannot be left behind.

    Raises:
        OSError: if nothing can be written there.
    """
    block = os.urandom(MIB)  # Some disks are quick with zeros alone.
    with tempfile.TemporaryFile(dir=folder) as probe:
        start = time.perf_counter()
        for offset in range(0, size, MIB):
            probe.write(block[: size - offset])
        probe.flush()
        os.fsync(probe.fileno())
        return size / (time.perf_counter() - start)
