"""``doctor``: checks what breaks a first run on several machines, and prints one line per check.

First, machines connect by plain sockets. Then ranks exchange their results through a store, which
needs no more than a host and a port: a report exists even if they cannot form a process group.
"""

import hashlib
import json
import os
import platform
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

Row = tuple[str, str, str]  # The status (pass, warn or fail), the name of the check, its result.
WAIT_SECONDS = 60.0  # How long machines and ranks wait for each other.
ALL_ARE_HERE = "all are here"
MUST_BE_EQUAL = ("versions", "code", "settings")  # Checks whose results have to be equal.
MIB = 2**20
GIB = 2**30


def meet() -> int:
    """Check, before ranks are started, that all machines reach the first; returns the exit code."""
    num_nodes = int(os.environ.get("NODES", "1"))
    node_rank = int(os.environ.get("NODE_RANK", "0"))
    host = os.environ.get("HEAD", "")
    port = int(os.environ.get("PORT", "29400"))
    if num_nodes == 1:
        return 0
    try:
        if node_rank == 0:
            result = listen(port, set(range(1, num_nodes)))
        else:
            result = connect(host, port, node_rank)
    except OSError as error:
        result = error.strerror or str(error)
    if result == ALL_ARE_HERE:
        return 0
    machine = f"machine {node_rank}, {socket.gethostname()}, at {host}, port {port}"
    return print_rows([("fail", "rendezvous", f"{machine}: {result}; start all within a minute")])


def listen(port: int, missing_machines: set[int]) -> str:
    """Wait for the other machines, and send each of them the numbers of those that are missing."""
    connections = list[socket.socket]()
    deadline = time.monotonic() + WAIT_SECONDS
    with socket.create_server(("", port)) as server, suppress(TimeoutError):
        while missing_machines:
            # A timeout of zero would mean not to wait at all, which raises another error.
            server.settimeout(max(0.01, deadline - time.monotonic()))
            connection, _ = server.accept()
            connections.append(connection)
            missing_machines.discard(int(connection.recv(9)))
    result = ALL_ARE_HERE
    if missing_machines:
        result = f"no machine {', '.join(map(str, sorted(missing_machines)))}"
    for connection in connections:
        connection.sendall(result.encode())
    return result


def connect(host: str, port: int, node_rank: int) -> str:
    """Send this machine's number to the first one; returns its answer, or why there is none."""
    deadline = time.monotonic() + WAIT_SECONDS
    result = ""
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host, port), timeout=WAIT_SECONDS) as connection:
                connection.sendall(str(node_rank).encode())
                # The first machine answers after WAIT_SECONDS, and may have started later.
                connection.settimeout(WAIT_SECONDS + 5)
                return connection.recv(999).decode() or "another program listens there"
        except OSError as error:
            result = error.strerror or str(error)
            # The first machine may not listen yet.
            time.sleep(0.5)
    return result


def doctor(config: Config) -> NoReturn:
    """Check each rank's machine and the process group; rank 0 prints. Exit code 1 on failure."""
    # The ten minutes that a run waits for other ranks are too long for a check.
    timeout_seconds = min(config.distributed.timeout_seconds, WAIT_SECONDS)
    config.distributed.timeout_seconds = timeout_seconds
    rows = check_machine(config)
    try:
        process = rendezvous(config)
    except (RuntimeError, UserError) as error:
        # There is no store to report through: every rank prints its own rows.
        exit_now(print_rows([*rows, fail_by_error("rendezvous", error)]))
    code = print_rows(merge(exchange(process, "machine", rows)), process.rank)
    # After a failure, the process group would only wait in vain.
    if code == 0:
        rows = check_process_group(config, process)
        code = print_rows(merge(exchange(process, "group", rows)), process.rank)
    # A launcher ends all ranks when one fails, so others wait until rank 0 has printed.
    with suppress(RuntimeError):
        if process.rank == 0:
            process.store.set("printed", "")
        process.store.wait(["printed"], timedelta(seconds=WAIT_SECONDS))
    exit_now(code)


def exchange(process: Process, name: str, value: Any) -> list[Any]:
    """Return the values of all ranks, None for a rank that sends none within WAIT_SECONDS."""
    process.store.set(f"{name}/{process.rank}", json.dumps(value))
    values = list[Any]()
    deadline = time.monotonic() + WAIT_SECONDS
    for rank in range(process.world_size):
        # One rank may use up the time, but values that are already there still count.
        seconds = max(0.01, deadline - time.monotonic())
        try:
            process.store.wait([f"{name}/{rank}"], timedelta(seconds=seconds))
            values.append(json.loads(process.store.get(f"{name}/{rank}")))
        except RuntimeError:
            values.append(None)
    return values


def merge(rows_by_rank: list[list[Row] | None]) -> list[Row]:
    """Return each row once, after the ranks that have it unless all do.

    Rows of MUST_BE_EQUAL fail if ranks differ.
    """
    silent: Row = ("fail", "ranks", "no report: this rank was not started, is gone or hangs")
    ranks_by_row: dict[Row, list[int]] = {}
    for rank, rows in enumerate(rows_by_rank):
        for status, name, text in rows or [silent]:
            ranks_by_row.setdefault((status, name, text), []).append(rank)
    names = [name for _, name, _ in ranks_by_row]
    merged = list[Row]()
    for (status, name, text), ranks in ranks_by_row.items():
        if name in MUST_BE_EQUAL and names.count(name) > 1:
            status = "fail"
        if len(ranks) < len(rows_by_rank):
            text = f"rank {', '.join(map(str, ranks))}: {text}"
        merged.append((status, name, text))
    return merged


def print_rows(rows: list[Row], rank: int = 0) -> int:
    """Print one line per row on rank 0; returns the exit code of all ranks, 1 if a row failed."""
    if rank == 0:
        # One call of print, so that lines of several ranks do not mix if each prints its own.
        print("\n".join(f"{status}  {name:<17} {text}" for status, name, text in rows), flush=True)
    return int(any(status == "fail" for status, _, _ in rows))


def fail_by_error(name: str, error: Exception) -> Row:
    """Return the row of a check that raised an error: the first line of its message."""
    return "fail", name, f"{socket.gethostname()}: {str(error).splitlines()[0]}"


def check_machine(config: Config) -> list[Row]:
    """Check what needs no other rank. The first rank of a machine checks memory and disk."""
    rows = [*identify(config), check_host_name(), check_interfaces(), list_variables()]
    if os.environ.get("LOCAL_RANK", "0") == "0":
        rows += [check_shared_memory(), check_disk(Path(config.run.dir))]
    return rows


def identify(config: Config) -> list[Row]:
    """Return what has to be equal on all ranks: versions, code and settings."""
    versions = f"Python {platform.python_version()}, PyTorch {torch.__version__}"
    if torch.cuda.is_available() and dist.is_nccl_available():
        versions += f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    # Machines may have copies of this package that differ.
    files = sorted(Path(__file__).parent.glob("*.py"))
    code = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    settings = hashlib.sha256(repr(config).encode())
    results = (versions, code.hexdigest()[:8], settings.hexdigest()[:8])
    return [("pass", name, result) for name, result in zip(MUST_BE_EQUAL, results, strict=True)]


def check_host_name() -> Row:
    """Check the address of the host name, at which other machines connect to gloo."""
    host_name = socket.gethostname()
    address = "unknown here"
    with suppress(OSError):
        address = socket.gethostbyname(host_name)
    text = f"{host_name} is {address}"
    num_nodes = os.environ.get("NODES") or os.environ.get("SLURM_STEP_NUM_NODES") or "1"
    is_reachable = not address.startswith(("127.", "unknown"))
    if int(num_nodes) == 1 or is_reachable or os.environ.get("GLOO_SOCKET_IFNAME"):
        return "pass", "host name", text
    advice = "so gloo connects to no other machine; set GLOO_SOCKET_IFNAME"
    return "fail", "host name", f"{text}, {advice}"


def check_interfaces() -> Row:
    """Check that the network interfaces that the environment names exist."""
    existing = [name for _, name in socket.if_nameindex()]
    names = ", ".join(existing)
    mistakes = list[str]()
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = os.environ.get(variable, "")
        # NCCL takes a list of prefixes: ^ before it excludes them, = asks for whole names.
        prefixes = tuple(value.lstrip("=").split(","))
        exists = any(name.startswith(prefixes) for name in existing)
        if value and not value.startswith("^") and not exists:
            mistakes.append(f"{variable} is {value}")
    if mistakes:
        return "fail", "interface", f"{', '.join(mistakes)}; this machine has {names}"
    return "pass", "interface", names


def list_variables() -> Row:
    """List the environment variables of NCCL and gloo."""
    variables = list[str]()
    for name, value in sorted(os.environ.items()):
        if name.startswith(("NCCL_", "GLOO_")):
            variables.append(f"{name}={value}")
    return "pass", "variables", ", ".join(variables) or "none set"


def check_shared_memory() -> Row:
    """Check the memory through which loaders and NCCL pass data within a machine."""
    folder = "/dev/shm" if os.path.exists("/dev/shm") else "/"
    num_bytes = shutil.disk_usage(folder).free
    if num_bytes >= GIB:
        status = "pass"
    elif num_bytes > 64 * MIB:  # Containers have 64 MiB by default.
        status = "warn"
    else:
        status = "fail"
    text = f"{num_bytes / MIB:.0f} MiB free; a container gets more by --ipc=host"
    return status, "/dev/shm", text


def check_disk(run_dir: Path) -> Row:
    """Check that run.dir can be written and has free space."""
    folder = run_dir.absolute()
    while not folder.is_dir():
        folder = folder.parent
    try:
        # This file has no name, so nothing of it can be left behind.
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(os.urandom(MIB))
    except OSError as error:
        return "fail", "disk", f"{folder} cannot be written: {error.strerror}"
    free_gib = shutil.disk_usage(folder).free / GIB
    status = "pass" if free_gib > 10 else "warn"
    return status, "disk", f"{folder}: {free_gib:.1f} GiB free"


def check_process_group(config: Config, process: Process) -> list[Row]:
    """Form the process group of a run, and measure in it; if that fails, return the reason."""
    try:
        setup(config, process)
        return [check_clocks(process), check_all_reduce(process)]
    except (RuntimeError, ValueError, UserError) as error:
        return [fail_by_error("process group", error)]


def check_clocks(process: Process) -> Row:
    """Compare the ranks' clocks as they leave a barrier, which is exact to some milliseconds."""
    dist.barrier(group=process.cpu_group)
    times = process.all_gather(time.time())
    seconds_apart = max(times) - min(times)
    status = "pass" if seconds_apart < 1 else "warn"
    first_rank = times.index(max(times))
    return status, "clocks", f"{1000 * seconds_apart:.1f} ms apart, rank {first_rank} is ahead"


def check_all_reduce(process: Process) -> Row:
    """Check the sum of an all-reduce, and measure the speed of each link in a ring of ranks."""
    world_size = process.world_size
    expected = world_size * (world_size + 1) / 2
    durations = list[float]()
    num_wrong = 0
    for _ in range(5):
        tensor = torch.full((16 * MIB,), process.rank + 1.0, device=process.device)
        dist.barrier(group=process.cpu_group)
        start = time.perf_counter()
        dist.all_reduce(tensor)
        # All-reduce returns before an accelerator is done; reading a number waits for it.
        tensor[0].item()
        durations.append(time.perf_counter() - start)
        num_wrong += int((tensor != expected).sum())
    if sum(process.all_gather(num_wrong)):
        return "fail", "all-reduce", "the sum is wrong"
    # The first call also opens connections, so each rank reports its fastest one.
    seconds = max(process.all_gather(min(durations)))
    # A ring of N ranks sends 2 (N - 1) / N bytes over each link for each byte of the tensor.
    num_bytes = 2 * (world_size - 1) / world_size * tensor.nbytes
    speed = num_bytes / seconds / 1e9
    return "pass", "all-reduce", f"64 MiB in {1000 * seconds:.1f} ms, {speed:.2f} GB/s on the bus"
