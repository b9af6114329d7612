"""``doctor``: checks what breaks a first run on several machines, and prints one line for each check.

First, machines connect by plain sockets. Then ranks exchange what they find through a store, which needs no more than a
host and a port: so there is a report even if they cannot form a process group.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import socket
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from .config import Config, UserError
from .distributed import Process, exit_now, rendezvous, setup

Row = tuple[str, str, str]  # pass, warn or fail; the check; what it found.
WAIT, MET = 60.0, "all are here"  # Seconds that machines and ranks wait for each other.
EQUAL = ("versions", "code", "settings")  # These have to be the same on all ranks.
MIB, GIB = 2**20, 2**30


def meet() -> int:
    """Check, before ranks are started, that all machines reach the first one; returns the exit code."""
    nodes, node_rank = int(os.environ.get("NODES", "1")), int(os.environ.get("NODE_RANK", "0"))
    host, port, found = os.environ.get("HEAD", ""), int(os.environ.get("PORT", "29400")), MET
    try:
        if nodes > 1:
            found = connect(host, port, node_rank) if node_rank else listen(port, set(range(1, nodes)))
    except OSError as error:
        found = error.strerror or str(error)
    text = f"machine {node_rank}, {socket.gethostname()}, at {host}, port {port}: {found}; start all within a minute"
    return 0 if found == MET else print_rows([("fail", "rendezvous", text)])


def listen(port: int, missing: set[int]) -> str:
    """Wait for the other machines, and send them the numbers of those that are missing."""
    connections, deadline = list[socket.socket](), time.monotonic() + WAIT
    with socket.create_server(("", port)) as server, suppress(TimeoutError):
        while missing:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            connections.append(server.accept()[0])
            missing.discard(int(connections[-1].recv(9)))
    found = f"no machine {', '.join(map(str, sorted(missing)))}" if missing else MET
    for connection in connections:
        connection.sendall(found.encode())
    return found


def connect(host: str, port: int, node_rank: int) -> str:
    """Send the first machine the number of this one; returns its answer, the numbers of missing ones."""
    deadline, found = time.monotonic() + WAIT, ""
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host, port), timeout=WAIT) as connection:
                connection.sendall(str(node_rank).encode())
                connection.settimeout(WAIT + 5)  # The first machine waits as long, and may have started later.
                return connection.recv(999).decode() or "another program listens there"
        except OSError as error:
            found = error.strerror or str(error)
            time.sleep(0.5)
    return found


def doctor(config: Config) -> NoReturn:
    """Check this rank's machine and the process group, on every rank; rank 0 prints. The exit code is 1 on failure."""
    config.distributed.timeout_seconds = min(config.distributed.timeout_seconds, WAIT)
    rows = [*identify(config), check_host_name(), *check_interfaces(), check_variables()]
    if os.environ.get("LOCAL_RANK", "0") == "0":
        rows += [check_shared_memory(), check_disk(Path(config.run.dir))]
    try:
        process = rendezvous(config)
    except (RuntimeError, UserError) as error:
        exit_now(print_rows([*rows, ("fail", "rendezvous", f"{socket.gethostname()}: {str(error).splitlines()[0]}")]))
    code = print_rows(merge(exchange(process, "alone", rows)), process.rank)
    if code == 0:  # Otherwise the process group would only wait in vain.
        code = print_rows(merge(exchange(process, "together", check_process_group(config, process))), process.rank)
    with suppress(RuntimeError):  # A launcher ends all ranks at the first failure; rank 0 has to print before.
        store = process.store
        store.set("printed", "") if process.rank == 0 else store.wait(["printed"], timedelta(seconds=WAIT))
    exit_now(code)


def exchange(process: Process, key: str, value: Any) -> list[Any]:
    """Return the values of all ranks, None for one that has not sent its value within WAIT."""
    process.store.set(f"{key}/{process.rank}", json.dumps(value))
    values, deadline = [], time.monotonic() + WAIT
    for other in range(process.world_size):
        try:
            process.store.wait([f"{key}/{other}"], timedelta(seconds=max(0.01, deadline - time.monotonic())))
            values.append(json.loads(process.store.get(f"{key}/{other}")))
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
    """List the variables of NCCL and gloo."""
    found = [f"{name}={value}" for name, value in sorted(os.environ.items()) if re.match("NCCL_|GLOO_", name)]
    return "pass", "variables", ", ".join(found) or "none set"


def check_shared_memory() -> Row:
    """Check the memory through which loaders and NCCL pass data within a machine."""
    free = shutil.disk_usage("/dev/shm" if os.path.exists("/dev/shm") else "/").free
    text = f"{free / MIB:.0f} MiB free; a container gets more by --ipc=host"
    return "pass" if free >= GIB else "warn" if free > 64 * MIB else "fail", "/dev/shm", text


def check_disk(run_dir: Path) -> Row:
    """Check that run.dir can be written, by a file that has no name and cannot stay behind, and has free space."""
    folder = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.is_dir())
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(os.urandom(MIB))
    except OSError as error:
        return "fail", "disk", f"{folder} cannot be written: {error.strerror}"
    free = shutil.disk_usage(folder).free / GIB
    return "pass" if free > 10 else "warn", "disk", f"{folder}: {free:.1f} GiB free"


def check_process_group(config: Config, process: Process) -> list[Row]:
    """Form the process group of a run, and measure in it; if that fails, return the reason."""
    try:
        setup(config, process)
        return [check_clocks(process), check_all_reduce(process)]
    except (RuntimeError, ValueError, UserError) as error:
        return [("fail", "process group", f"{socket.gethostname()}: {str(error).splitlines()[0]}")]


def check_clocks(process: Process) -> Row:
    """Compare the ranks' clocks as they leave a barrier, which is exact to some milliseconds."""
    dist.barrier(group=process.cpu_group)
    times = process.all_gather(time.time())
    apart = max(times) - min(times)
    rank = times.index(max(times))
    return "pass" if apart < 1 else "warn", "clocks", f"{1000 * apart:.1f} ms apart, rank {rank} is ahead"


def check_all_reduce(process: Process) -> Row:
    """Check the sum of an all-reduce; a ring sends 2 (N - 1) / N bytes over each link for each byte."""
    seconds, wrong, ranks = list[float](), 0, process.world_size
    for _ in range(5):
        tensor = torch.full((16 * MIB,), process.rank + 1.0, device=process.device)
        dist.barrier(group=process.cpu_group)
        start = time.perf_counter()
        dist.all_reduce(tensor)
        tensor[0].item()  # Waits for the device.
        seconds.append(time.perf_counter() - start)
        wrong += int((tensor != ranks * (ranks + 1) / 2).sum())
    if sum(process.all_gather(wrong)):
        return "fail", "all-reduce", "the sum is wrong"
    slowest = max(process.all_gather(min(seconds)))
    speed = 2 * (ranks - 1) / ranks * tensor.nbytes / slowest / 1e9
    return "pass", "all-reduce", f"64 MiB in {1000 * slowest:.1f} ms, {speed:.2f} GB/s on the bus"
