"""``doctor``: checks what breaks a first run on several machines, and prints one line for each check.

First, machines connect by plain sockets. Then ranks exchange what they find through a store, which needs no more than a
host and a port: so there is a report even if they cannot form a process group.
"""

import gc
import hashlib
import json
import os
import platform
import re
import shutil
import socket
import statistics
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .config import Config, UserError
from .distributed import Process, find_ranks, setup

Row = tuple[str, str, str]  # pass, warn or fail; the check; what it found.
WAIT = 60.0  # Seconds that machines and ranks wait for each other.
EQUAL = ("versions", "code", "settings")  # These have to be the same on all ranks.
MIB, GIB = 2**20, 2**30


def meet() -> int:
    """Check, before ranks are started, that all machines reach the first one; returns the exit code."""
    nodes, node_rank = int(os.environ.get("NODES", "1")), int(os.environ.get("NODE_RANK", "0"))
    host, port = os.environ.get("HEAD", ""), int(os.environ.get("PORT", "29400"))
    try:
        if nodes > 1:
            connect(host, port, node_rank) if node_rank else wait_for_machines(port, nodes)
    except OSError as error:
        text = f"machine {node_rank}, {socket.gethostname()}: {host}, port {port}: {error.strerror or error}; "
        return print_rows([("fail", "rendezvous", text + "HEAD is machine 0; start all within a minute")])
    return 0


def wait_for_machines(port: int, nodes: int) -> None:
    """Listen until all other machines have connected, and tell them; raises OSError after WAIT seconds."""
    missing, connections, deadline = set(range(1, nodes)), [], time.monotonic() + WAIT
    both = socket.has_dualstack_ipv6()  # IPv4 and IPv6.
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", port), family=family, dualstack_ipv6=both) as server:
        while missing:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connections.append(server.accept()[0])
            except TimeoutError:
                raise OSError(f"machine(s) {', '.join(map(str, sorted(missing)))} did not connect") from None
            missing.discard(int(connections[-1].recv(9)))
        for connection in connections:
            connection.sendall(b"met")


def connect(host: str, port: int, node_rank: int) -> None:
    """Tell the first machine which one this is, and wait for the others; raises OSError after WAIT seconds."""
    deadline = time.monotonic() + WAIT
    while True:
        try:
            with socket.create_connection((host, port), timeout=WAIT) as connection:
                connection.sendall(str(node_rank).encode())
                if connection.recv(3) == b"met":
                    return
                raise OSError("it is not this doctor that listens there")
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def doctor(config: Config) -> int:
    """Check this rank's machine and the process group, on every rank; rank 0 prints. Returns the exit code."""
    config.distributed.timeout_seconds = min(config.distributed.timeout_seconds, WAIT)
    folder = next(path for path in Path(config.run.dir, "file").absolute().parents if path.exists())
    rows = [*identify(config), check_host_name(), *check_interfaces(), check_variables()]
    if os.environ.get("LOCAL_RANK", "0") == "0":
        rows += [check_shared_memory(), check_disk(folder)]
    try:
        store, rank, world_size = find_ranks(config.distributed.init_method, timedelta(seconds=WAIT))
    except (RuntimeError, ValueError, KeyError) as error:
        where = f"{socket.gethostname()}: {os.environ.get('MASTER_ADDR')}, port {os.environ.get('MASTER_PORT')}"
        return print_rows([*rows, ("fail", "rendezvous", f"{where}: {str(error).splitlines()[0]}")])
    probe = folder / f".doctor-{socket.gethostname()}-{os.getpid()}"
    with suppress(OSError):
        probe.touch()
    ranks = exchange(store, "alone", [str(probe), rows], rank, world_size)
    code = print_rows(merge([each and each[1] for each in ranks]), rank)
    if code == 0:  # Otherwise the process group would only wait in vain.
        rows = check_process_group(config)
        if not os.path.exists(ranks[0][0]):
            rows.append(("warn", "shared disk", f"{folder} is not rank 0's, where the checkpoints are"))
        code = print_rows(merge(exchange(store, "together", rows, rank, world_size)), rank)
    probe.unlink(missing_ok=True)
    with suppress(RuntimeError):  # A launcher ends all ranks at the first failure; rank 0 has to print before.
        store.set("printed", "") if rank == 0 else store.wait(["printed"], timedelta(seconds=WAIT))
    return code


def exchange(store: Any, key: str, value: Any, rank: int, world_size: int) -> list[Any]:
    """Return the values of all ranks, None for one that is silent for twice WAIT seconds."""
    store.set(f"{key}/{rank}", json.dumps(value))
    values, deadline = [], time.monotonic() + 2 * WAIT
    for other in range(world_size):
        try:
            store.wait([f"{key}/{other}"], timedelta(seconds=max(0.01, deadline - time.monotonic())))
            values.append(json.loads(store.get(f"{key}/{other}")))
        except RuntimeError:
            values.append(None)
    return values


def merge(ranks: list[list[Row] | None]) -> list[Row]:
    """Return each row once, with the ranks that found it unless all did; rows that have to be equal fail if not."""
    found: dict[Row, list[int]] = {}
    for rank, rows in enumerate(ranks):
        for state, name, text in rows or [("fail", "ranks", "no report: this rank was not started, is gone or hangs")]:
            found.setdefault((state, name, text), []).append(rank)
    names, merged = [name for _, name, _ in found], []
    for (state, name, text), numbers in found.items():
        prefix = "" if len(numbers) == len(ranks) else f"rank {', '.join(map(str, numbers))}: "
        differs = name in EQUAL and names.count(name) > 1
        merged.append(("fail" if differs else state, name, prefix + text))
    return merged


def print_rows(rows: list[Row], rank: int = 0) -> int:
    """Print one line for each row on rank 0; returns 1 if any failed."""
    if rank == 0:
        print("\n".join(f"{state}  {name:<17} {text}" for state, name, text in rows), flush=True)
    return int(any(state == "fail" for state, _, _ in rows))


def identify(config: Config) -> list[Row]:
    """Return what has to be equal on all ranks: versions, code and settings."""
    versions = f"Python {platform.python_version()}, PyTorch {torch.__version__}"
    if torch.cuda.is_available() and dist.is_nccl_available():
        versions += f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    code = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    digests = [hashlib.sha256(content).hexdigest()[:8] for content in (code, repr(config).encode())]
    return [("pass", name, text) for name, text in zip(EQUAL, [versions, *digests], strict=True)]


def check_host_name() -> Row:
    """Check that other machines reach gloo at the address of the host name, unless an interface is named."""
    name, address = socket.gethostname(), "unknown here"
    with suppress(OSError):
        address = socket.gethostbyname(name)
    several = int(os.environ.get("NODES") or os.environ.get("SLURM_STEP_NUM_NODES") or "1") > 1
    if several and address.startswith(("127.", "unknown")) and not os.environ.get("GLOO_SOCKET_IFNAME"):
        return "fail", "host name", f"{name} is {address}, so gloo connects to no other machine; set GLOO_SOCKET_IFNAME"
    return "pass", "host name", f"{name} is {address}"


def check_interfaces() -> list[Row]:
    """Check that the interfaces that the environment names exist."""
    existing, rows = [name for _, name in socket.if_nameindex()], []
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = os.environ.get(variable, "")
        words = value.lstrip("^=").split(",")  # NCCL: ^ excludes, = asks for the whole name.
        if value and not value.startswith("^") and not any(name.startswith(w) for name in existing for w in words):
            rows.append(("fail", "interface", f"{variable} is {value}; this machine has {', '.join(existing)}"))
    return rows or [("pass", "interface", ", ".join(existing))]


def check_variables() -> Row:
    """List the variables of NCCL and gloo; those that take a fast path from NCCL are worth a second thought."""
    found = {name: value for name, value in sorted(os.environ.items()) if re.match("(TORCH_)?NCCL_|GLOO_", name)}
    text = ", ".join(f"{name}={value}" for name, value in found.items()) or "none set"
    is_slow = any(re.match("NCCL_(P2P|IB|SHM)_DISABLE", name) and value != "0" for name, value in found.items())
    return "warn" if is_slow else "pass", "variables", text


def check_shared_memory() -> Row:
    """Check the memory through which loaders and NCCL pass data within a machine."""
    free = shutil.disk_usage("/dev/shm" if os.path.exists("/dev/shm") else "/").free
    text = f"{free / MIB:.0f} MiB free; a container gets more by --ipc=host"
    return "pass" if free >= GIB else "warn" if free > 64 * MIB else "fail", "/dev/shm", text


def check_disk(folder: Path) -> Row:
    """Check that run.dir can be written, and how fast, by a file that has no name and cannot stay behind."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            start = time.perf_counter()
            file.write(os.urandom(32 * MIB))
            os.fsync(file.fileno())
            speed = 32 / (time.perf_counter() - start)
        free = shutil.disk_usage(folder).free / GIB
    except OSError as error:
        return "fail", "disk", f"{folder} cannot be written: {error.strerror}"
    return "pass" if free > 10 else "warn", "disk", f"{folder}: {free:.1f} GiB free, writes {speed:.0f} MiB/s"


def check_process_group(config: Config) -> list[Row]:
    """Form the process group of a run, and measure in it; if that fails, return the reason."""
    try:
        process = setup(config)
        rows = [check_clocks(process), *check_all_reduce(process)]
        dist.destroy_process_group()
        gc.collect()
        return rows
    except (RuntimeError, ValueError, UserError) as error:
        return [("fail", "process group", f"{socket.gethostname()}: {str(error).splitlines()[0]}")]


def check_clocks(process: Process) -> Row:
    """Compare the ranks' clocks as they leave a barrier, which is exact to some milliseconds."""
    stamps = []
    for _ in range(5):
        dist.barrier(group=process.cpu_group)
        stamps.append(time.time())
    ranks = process.all_gather(stamps)
    ahead = [statistics.median(a - b for a, b in zip(own, ranks[0], strict=True)) for own in ranks]
    apart = max(ahead) - min(ahead)
    text = f"{1000 * apart:.1f} ms apart, rank {ahead.index(max(ahead))} is ahead"
    return "pass" if apart < 1 else "warn", "clocks", text


def check_all_reduce(process: Process) -> list[Row]:
    """Check the sum of an all-reduce, and measure it.

    A ring sends 2 (N - 1) / N bytes over each link for each byte, which gives the bandwidth of the bus.
    Source: NVIDIA's nccl-tests, doc/PERFORMANCE.md.
    """
    world_size, rows = process.world_size, []
    for size in (MIB, 64 * MIB):
        seconds, right = [], True
        for _ in range(5):
            tensor = torch.full((size // 4,), process.rank + 1.0, device=process.device)
            dist.barrier(group=process.cpu_group)
            start = time.perf_counter()
            dist.all_reduce(tensor)
            tensor[0].item()  # Waits for the device.
            seconds.append(time.perf_counter() - start)
            right = right and bool((tensor == world_size * (world_size + 1) / 2).all())
        slowest, all_right = max(process.all_gather(min(seconds))), all(process.all_gather(right))
        speed = 2 * (world_size - 1) / world_size * size / slowest / 1e9
        text = f"{1000 * slowest:.1f} ms, {speed:.2f} GB/s on the bus" if all_right else "the sum is wrong"
        rows.append(("pass" if all_right else "fail", f"all-reduce {size // MIB} MiB", text))
    return rows
