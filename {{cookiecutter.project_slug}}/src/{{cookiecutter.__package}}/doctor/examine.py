"""The steps of an examination:

    1. each rank alone         checks its machine: system, connectivity, NCCL's variables
    2. all ranks at a store    exchange and compare their results; rank 0 prints the table
    3. all ranks in a group    measure how fast they compute and send; rank 0 prints the rest

A store needs only an address and a port, so the ranks can exchange results even if no process group can be formed.
"""

import json
import socket
import time
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..config import UserError
from ..launch import is_first_on_machine
from ..runtime import Process, choose_backend, find_process, process_group, rendezvous_arguments
from . import connectivity, interconnect, nccl, system
from .report import Requirements, Row, failed, format_count, format_table
from .speed import measure_speed

# Longest wait for other ranks, in seconds: a check should not wait as long as a run may.
PATIENCE = 60.0
# If one of these fails, the ranks cannot form a process group, and would wait in vain.
NEEDED_FOR_GROUP = {"ranks", "device", "backend", "versions", "project"}
NEEDED_FOR_GROUP |= {"host name", "rendezvous", "gloo interface", "NCCL interface"}


def examine(needs: Requirements) -> int:
    """Check this machine for a run; every rank calls it. Returns the exit code: 1 if something would break the run."""
    patience = min(needs.distributed.startup_timeout_seconds, PATIENCE)
    distributed = replace(needs.distributed, startup_timeout_seconds=patience)
    needs = replace(needs, distributed=distributed)
    process, rows = examine_machine(needs)
    where = rendezvous_arguments(distributed.init_method, process)
    rows.append(connectivity.check_rendezvous(where.get("init_method"), process))
    if "rendezvous" in failed([rows]):
        return print_alone(rows, process)
    try:
        return examine_together(needs, process, rows, open_store(where, patience))
    except (RuntimeError, ValueError, OSError) as error:
        advice = "start all ranks at the same time; check that the address is rank 0's, and no firewall is in between"
        return print_alone([*rows, Row("ranks", first_line(error), "fail", advice)], process)


def examine_machine(needs: Requirements) -> tuple[Process, list[Row]]:
    """Return which process this is, and the results of its own checks."""
    distributed = needs.distributed
    try:
        process, rows = find_process(distributed, needs.devices_per_rank), []
    except UserError as error:
        process = find_process(replace(distributed, device="cpu"), needs.devices_per_rank)
        rows = [Row("device", str(error), "fail")]
    try:
        backend = choose_backend(distributed.backend, process.device)
        usable = Row("backend", backend)
    except UserError as error:
        backend, usable = distributed.backend, Row("backend", str(error), "fail")
    rows = rows or system.check_devices(process, needs.devices_per_rank)
    rows = [*system.check_code(needs.settings), *rows, usable]
    rows += [system.check_open_files(needs.num_workers, process), connectivity.check_host_name(process, backend)]
    rows += [*connectivity.check_interfaces(backend), *nccl.check_variables(backend)]
    if process.local_rank == 0:  # Once per machine.
        rows += [system.check_driver(), system.check_shared_memory(needs.num_workers, process)]
        if process.is_main or needs.checkpoint.format == "sharded":  # These ranks write there.
            rows += system.check_run_directory(needs)
    return process, rows


def open_store(where: dict[str, Any], patience: float) -> Any:
    """Open the store at the rendezvous ``where``, waiting up to ``patience`` seconds.

    Raises:
        RuntimeError, OSError: if rank 0 cannot be reached, or not all ranks arrived.
    """
    if "store" in where:
        return where["store"]
    init_method, rank, world_size = where["init_method"], where["rank"], where["world_size"]
    if rank and not init_method.startswith("file://"):
        connectivity.wait_for_listener(*connectivity.parse_rendezvous(init_method), patience)
    timeout = timedelta(seconds=patience)
    return next(dist.rendezvous(init_method, rank, world_size, timeout=timeout))[0]


def examine_together(needs: Requirements, process: Process, rows: list[Row], store: Any) -> int:
    """Exchange results with the other ranks, and measure the interconnect; returns the exit code."""
    patience = needs.distributed.startup_timeout_seconds
    ranks = compare(gather_rows(store, "machines", rows, process, patience))
    print_on_main(process, describe_ranks(process), format_table(ranks))
    if failed(ranks) & NEEDED_FOR_GROUP:
        print_on_main(process, "the interconnect is not measured until these rows pass")
    else:
        measured = gather_rows(store, "interconnect", measure(needs), process, 2 * patience)
        print_on_main(process, format_table(measured))
        ranks = [own + more for own, more in zip(ranks, measured, strict=True)]
    print_on_main(process, format_count(ranks))
    leave_together(store, process)
    return 1 if failed(ranks) else 0


def gather_rows(store: Any, name: str, own: list[Row], process: Process, patience: float) -> list[list[Row]]:
    """Return the rows of all ranks; a rank that is silent for ``patience`` seconds gets a failed row."""
    keys = [f"doctor/{name}/{rank}" for rank in range(process.world_size)]
    store.set(keys[process.rank], json.dumps([asdict(row) for row in own]))
    if process.is_main:
        with suppress(RuntimeError):
            store.wait(keys, timedelta(seconds=patience))
        everyone = []
        for rank, key in enumerate(keys):
            silent = Row("ranks", f"nothing was heard from rank {rank}", "fail", "read its output to see what happened")
            everyone.append(json.loads(store.get(key)) if store.check([key]) else [asdict(silent)])
        store.set(f"doctor/{name}", json.dumps(everyone))
    store.wait([f"doctor/{name}"], timedelta(seconds=patience + 30))  # Rank 0 may have arrived later.
    return [[Row(**row) for row in rows] for rows in json.loads(store.get(f"doctor/{name}"))]


def compare(ranks: list[list[Row]]) -> list[list[Row]]:
    """Return the rows; those that have to be the same on all ranks but differ are marked as failed."""
    for name in ("versions", "project", "backend"):
        found = {row for rows in ranks for row in rows if row.name == name}
        if len(found) > 1:
            judged = {row: replace(row, state="fail", advice="make it the same on all ranks") for row in found}
            ranks = [[judged.get(row, row) for row in rows] for rows in ranks]
    return ranks


def measure(needs: Requirements) -> list[Row]:
    """Measure the interconnect in a process group of all ranks; if none can be formed, return a row with the reason."""
    try:
        with process_group(needs.distributed, needs.devices_per_rank) as process:
            device = torch.device("cpu") if needs.distributed.backend == "gloo" else process.device
            return [measure_speed(process.device), *interconnect.measure(process.world_size, device)]
    except (RuntimeError, ValueError, UserError) as error:
        advice = "run again with TORCH_DISTRIBUTED_DEBUG=DETAIL and NCCL_DEBUG=INFO to see more"
        return [Row("process group", first_line(error), "fail", advice)]


def print_alone(rows: list[Row], process: Process) -> int:
    """Print the results of this rank alone, because it cannot reach the others; returns the exit code.

    Once per machine, whose ranks have the same results. The others wait: at the first exit, a launcher ends all ranks.
    """
    if is_first_on_machine():
        title = f"{describe_ranks(process)}; rank {process.rank} alone:"
        print(title, format_table([rows]), format_count([rows]), sep="\n", flush=True)
    else:
        time.sleep(5)
    return 1


def describe_ranks(process: Process) -> str:
    """Return how many ranks there are, and how many of them are on this machine."""
    return f"{process.world_size} rank(s), {process.local_world_size} of them on {socket.gethostname()}"


def print_on_main(process: Process, *lines: str) -> None:
    """Print lines on rank 0."""
    if process.is_main:
        print(*lines, sep="\n", flush=True)


def leave_together(store: Any, process: Process) -> None:
    """Wait until rank 0 has printed everything: at the first exit code 1, a launcher ends the other ranks.

    Rank 0 ends last, because it may hold the store.
    """
    others = [f"doctor/left/{rank}" for rank in range(1, process.world_size)]
    with suppress(RuntimeError):  # A rank that is gone has already sent its results.
        if process.is_main:
            store.set("doctor/printed", "")
            store.wait(others, timedelta(seconds=10))
        else:
            store.wait(["doctor/printed"])
            store.set(others[process.rank - 1], "")


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, which describes the error; PyTorch adds stack traces below."""
    return next(iter(str(error).splitlines()), type(error).__name__)
