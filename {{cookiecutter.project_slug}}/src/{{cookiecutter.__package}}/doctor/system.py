"""Checks of this process and its machine: versions, devices, limits, and the disk of the run directory."""

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..config import UserError
from ..launch import lock
from ..runtime import Process
from .report import Requirements, Row

PACKAGE_DIR = Path(__file__).parents[1]
MIB, GIB = 2**20, 2**30
# The size of /dev/shm that containers have by default; loader processes and NCCL soon fill it.
SMALL_SHM = 64 * MIB
# What NVIDIA asks for (NCCL user guide, "Memory issues").
GOOD_SHM = GIB
# Linux gives a process 1024 open files by default; NCCL may need thousands at scale (its user guide, same chapter).
GOOD_FILES = 1024
PROBE = 32 * MIB


def check_code(settings: Mapping[str, Any]) -> list[Row]:
    """Identify the libraries, this package and the settings, which all have to be the same on all ranks."""
    versions = [f"Python {platform.python_version()}", f"PyTorch {torch.__version__}"]
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        versions.append("NCCL " + ".".join(map(str, torch.cuda.nccl.version())))
    code = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(PACKAGE_DIR.rglob("*.py")))).hexdigest()[:8]
    values = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    return [Row("versions", ", ".join(versions)), Row("project", f"code {code}, settings {values}")]


def query_nvidia_smi(*arguments: str) -> list[list[str]]:
    """Return what ``nvidia-smi`` prints, one list of fields per line; nothing if it is not installed."""
    try:
        command = ["nvidia-smi", *arguments, "--format=csv,noheader,nounits"]
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [[field.strip() for field in line.split(",")] for line in output.splitlines() if line.strip()]


def check_driver() -> Row:
    """Check the driver of this machine's NVIDIA GPUs."""
    found = sorted({version for (version,) in query_nvidia_smi("--query-gpu=driver_version")})
    return Row("driver", "NVIDIA " + ", ".join(found) if found else "none")


def check_devices(process: Process, count: int) -> list[Row]:
    """Check the ``count`` devices of this rank: their memory, and which other processes use it."""
    if process.device.type == "cpu":
        return [check_processors(process)]
    if process.device.type != "cuda":
        return [Row("device", str(process.device))]
    # Query before this process touches a device, which makes it one of the users.
    users = query_nvidia_smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
    first = process.device.index or 0
    return [check_gpu(index, users) for index in range(first, min(first + count, torch.cuda.device_count()))]


def check_processors(process: Process) -> Row:
    """Compare the threads of the ranks with the processors that they may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads, ranks = torch.get_num_threads(), process.local_world_size
    found = f"cpu, {usable} processor(s), {ranks} rank(s) on this machine with {threads} thread(s) each"
    if threads > 1 and threads * ranks > usable:
        return Row("device", found, "warn", f"set OMP_NUM_THREADS={max(1, usable // ranks)}")
    return Row("device", found)


def check_gpu(index: int, users: list[list[str]]) -> Row:
    """Check one NVIDIA GPU."""
    gpu = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    others = [
        f"process {pid} ({Path(name).name}, {memory} MiB)"
        for uuid, pid, name, memory in users
        if uuid.removeprefix("GPU-") == str(gpu.uuid).removeprefix("GPU-") and pid != str(os.getpid())
    ]
    found = f"cuda:{index} {gpu.name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if others:
        found += ", used by " + ", ".join(others)
    if free < total / 10:
        return Row("device", found, "fail", "end what uses its memory, or choose others with CUDA_VISIBLE_DEVICES")
    if others or free < total / 2:
        return Row("device", found, "warn", "it shares its memory and its time with others")
    return Row("device", found)


def check_shared_memory(num_workers: int, process: Process) -> Row:
    """Check ``/dev/shm``, through which loader processes pass batches, and NCCL passes data within a machine."""
    name, folder = "/dev/shm", Path("/dev/shm")
    if not folder.is_dir():
        return Row(name, "none")
    space = os.statvfs(folder)
    size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    found = f"{free / MIB:.0f} of {size / MIB:.0f} MiB free"
    users = ["loader processes"] if num_workers else []
    if process.device.type == "cuda" and process.local_world_size > 1:
        users.append("NCCL")
    advice = "give it 1 GiB or more: mount -o remount,size=1g /dev/shm" if size < GOOD_SHM else "remove old files there"
    if users and free <= SMALL_SHM:
        return Row(name, found, "fail", f"too little for {' and '.join(users)}; {advice}")
    if free <= SMALL_SHM or (users and free < GOOD_SHM):
        return Row(name, found, "warn", f"little for loader processes and NCCL; {advice}")
    return Row(name, found)


def check_open_files(num_workers: int, process: Process) -> Row:
    """Check the limit of open files: for connections to the other ranks, and about twenty files per loader process."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return Row("open files", "no limit")
    needed = 24 + 4 * process.world_size + 16 * num_workers  # Measured: with two loader processes, a rank fails at 40.
    good = max(GOOD_FILES, 2 * needed)
    remedy = f"ulimit -n {good}"
    if hard != resource.RLIM_INFINITY and hard < good:
        remedy = f"ask the administrator to raise the hard limit from {hard} to {good}"
    if limit < needed:
        return Row("open files", f"{limit} at most", "fail", f"this run needs {needed}; {remedy}")
    if limit < good:
        return Row("open files", f"{limit} at most", "warn", f"many ranks or loader processes need more; {remedy}")
    return Row("open files", f"{limit} at most")


def check_run_directory(needs: Requirements) -> list[Row]:
    """Check that the run directory can be written and is not in use, and how much fits there. Leaves nothing behind."""
    folder = needs.run_dir.absolute()
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    try:
        free = shutil.disk_usage(existing).free
        speed = write_speed(existing, min(PROBE, free // 2))
        if os.path.exists(folder / ".lock"):
            lock(folder, patience=0)
    except UserError as error:
        return [Row("run.dir", str(error), "fail")]
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return [Row("run.dir", f"cannot write in {existing}: {error.strerror}", "fail", "give another run.dir")]
        free, speed = 0, 0.0
    return [Row("run.dir", f"{existing} can be written"), check_disk(needs, free, speed)]


def check_disk(needs: Requirements, free: int, speed: float) -> Row:
    """Compare free bytes, and bytes per second, with what checkpoints need."""
    one = 12 * needs.parameters  # Bytes of a checkpoint: each weight in fp32, and AdamW's two moments.
    wanted = needs.checkpoint.keep + 2  # The newest, the best, and the one that is being written.
    room = f"{free / GIB:.1f} GiB" if free >= GIB else f"{free / MIB:.1f} MiB"
    found = f"{room} free, {speed / MIB:.0f} MiB/s; a checkpoint has {one / MIB:.1f} MiB"
    if free < 2 * one:
        return Row("disk", found, "fail", "make room for at least two checkpoints, or give another run.dir")
    if free < wanted * one:
        return Row("disk", found, "warn", f"make room for {wanted} checkpoints (checkpoint.keep, the best, a new one)")
    if speed and one / speed > needs.distributed.timeout_seconds:
        return Row("disk", found, "warn", "a save may take longer than distributed.timeout_seconds; raise that")
    return Row("disk", found)


def write_speed(folder: Path, size: int) -> float:
    """Return the bytes per second that reach the disk, measured with an unnamed file, which cannot be left behind."""
    block = os.urandom(MIB)  # Some disks are fast only with zeros.
    with tempfile.TemporaryFile(dir=folder) as probe:
        start = time.perf_counter()
        for offset in range(0, size, MIB):
            probe.write(block[: size - offset])
        probe.flush()
        os.fsync(probe.fileno())
        return size / (time.perf_counter() - start)
