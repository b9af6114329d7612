"""``doctor``: looks at machines, network and disk before a long run, and says in a table what it found.

First each rank looks around by itself; then the ranks meet at a store, which needs no more than an address and a port,
and tell each other; and only if nothing stands in the way do they form a process group and measure their links.
"""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from . import health, links, nccl, network
from .config import Config, UserError, speaks_for_machine
from .distributed import World, choose_backend, process_group, rendezvous, resolve
from .findings import Row, failed, format_count, format_table, to_plain

# Longest wait for other ranks, in seconds; who checks a machine does not want to wait as long as a run may.
PATIENCE = 60.0
# With one of these failed, ranks that form a process group would wait for each other in vain.
NEEDED = {
    *("ranks", "device", "backend", "versions", "project"),
    *("host name", "meeting point", "gloo interface", "NCCL interface"),
}


def doctor(config: Config) -> int:
    """Check this machine for a run with these settings; every rank of the run calls it.

    Returns:
        The exit code: 1 if something was found that would break a run, on any rank, else 0.
    """
    settings = config.distributed
    settings.startup_timeout_seconds = min(settings.startup_timeout_seconds, PATIENCE)
    world, rows = look_around(config)
    place = rendezvous(settings.init_method, world)
    rows.append(network.meeting_point(place.get("init_method"), world))
    if "meeting point" in failed([rows]):
        return say_alone(rows, world)
    try:
        return look_together(config, world, rows, meet(place, settings.startup_timeout_seconds))
    except (RuntimeError, ValueError, OSError) as error:
        advice = "start all ranks at the same time; see that the address is rank 0's, and no firewall is in between"
        return say_alone([*rows, Row("ranks", first_line(error), "fail", advice)], world)


def look_together(config: Config, world: World, rows: list[Row], store: Any) -> int:
    """Tell the other ranks what this one found, and measure the links between all; gives the exit code.

    Raises:
        RuntimeError, OSError: if rank 0 cannot be reached, or goes away.
    """
    patience = config.distributed.startup_timeout_seconds
    ranks = compare(share(store, "machines", rows, world, patience))
    speak(world, heading(world), format_table(ranks))
    if failed(ranks) & NEEDED:
        speak(world, "the links between ranks are not measured until these rows pass")
    else:
        measured = share(store, "links", measure(config), world, 2 * patience)
        speak(world, format_table(measured))
        ranks = [mine + more for mine, more in zip(ranks, measured, strict=True)]
    speak(world, format_count(ranks))
    leave_together(store, world)
    return 1 if failed(ranks) else 0


def look_around(config: Config) -> tuple[World, list[Row]]:
    """This process's place among all, and what it finds without the others."""
    world, unfit = find_world(config)
    backend, usable = find_backend(config, world)
    rows = [health.versions(), health.project(config)]
    rows += [*(unfit or health.devices(world, config.parallel.devices_per_rank())), usable]
    rows += [health.open_files(config, world), network.own_host_name(world, backend), *network.interfaces(backend)]
    rows += nccl.variables(backend)
    if world.local_rank == 0:  # Once a machine.
        rows += [health.driver(), health.shared_memory(config, world)]
        if world.is_main or config.checkpoint.format == "sharded":  # Who writes there.
            rows += health.run_directory(config)
    return world, rows


def find_world(config: Config) -> tuple[World, list[Row]]:
    """This process's place; on the CPU, with a row that says why, if it cannot have a device."""
    devices = config.parallel.devices_per_rank()
    try:
        return resolve(config.distributed, devices), []
    except UserError as error:
        on_cpu = resolve(replace(config.distributed, device="cpu"), devices)
        return on_cpu, [Row("device", str(error), "fail")]


def find_backend(config: Config, world: World) -> tuple[str, Row]:
    """The backend of the run, and whether there is one."""
    wanted = config.distributed.backend
    try:
        backend = choose_backend(wanted, world.device)
    except UserError as error:
        return wanted, Row("backend", str(error), "fail")
    return backend, Row("backend", backend)


def meet(place: dict[str, Any], patience: float) -> Any:
    """The store at which the ranks meet.

    Args:
        place: Where that is, as ``rendezvous`` says.
        patience: Longest wait for rank 0, and of rank 0 for the others, in seconds.

    Raises:
        RuntimeError, OSError: if rank 0 cannot be reached, or not all came.
    """
    if "store" in place:
        return place["store"]
    where, rank, size = place["init_method"], place["rank"], place["world_size"]
    if rank and not where.startswith("file://"):
        network.await_listener(*network.read_place(where), patience)
    return next(dist.rendezvous(where, rank, size, timeout=timedelta(seconds=patience)))[0]  # type: ignore[attr-defined]


def share(store: Any, name: str, mine: list[Row], world: World, patience: float) -> list[list[Row]]:
    """The rows of all ranks, on all ranks; of one that tells nothing for ``patience`` seconds, a row that says so."""
    keys = [f"doctor/{name}/{rank}" for rank in range(world.size)]
    store.set(keys[world.rank], json.dumps(to_plain(mine)))
    if world.is_main:
        with suppress(RuntimeError):
            store.wait(keys, timedelta(seconds=patience))
        told = [
            json.loads(store.get(key)) if store.check([key]) else to_plain([silence(rank)])
            for rank, key in enumerate(keys)
        ]
        store.set(f"doctor/{name}", json.dumps(told))
    store.wait([f"doctor/{name}"], timedelta(seconds=patience + 30))  # Rank 0 came later, perhaps.
    return [[Row(**row) for row in rows] for rows in json.loads(store.get(f"doctor/{name}"))]


def silence(rank: int) -> Row:
    """The row of a rank that says nothing."""
    return Row("ranks", f"nothing was heard from rank {rank}", "fail", "see what became of it in its output")


def compare(ranks: list[list[Row]]) -> list[list[Row]]:
    """The same rows, of which those fail that have to be the same on all ranks and are not."""
    for name in ("versions", "project", "backend"):
        found = {row for rows in ranks for row in rows if row.name == name}
        if len(found) > 1:
            judged = {row: replace(row, state="fail", advice="make it the same on all ranks") for row in found}
            ranks = [[judged.get(row, row) for row in rows] for rows in ranks]
    return ranks


def measure(config: Config) -> list[Row]:
    """What is found in a process group of all ranks; a row that says why, if none can be formed."""
    try:
        with process_group(config) as world:
            on_cpu = config.distributed.backend == "gloo"
            return links.measure(world, torch.device("cpu") if on_cpu else world.device)
    except (RuntimeError, ValueError, UserError) as error:
        advice = "run again with TORCH_DISTRIBUTED_DEBUG=DETAIL and NCCL_DEBUG=INFO to see more"
        return [Row("process group", first_line(error), "fail", advice)]


def say_alone(rows: list[Row], world: World) -> int:
    """Tell what this rank found by itself, since it does not reach the others; gives the exit code.

    Once a machine: its ranks have the same to say. The others wait, for a launcher ends all of them with the first.
    """
    if speaks_for_machine():
        title = f"{heading(world)}; rank {world.rank} alone:"
        print(title, format_table([rows]), format_count([rows]), sep="\n", flush=True)
    else:
        time.sleep(5)
    return 1


def heading(world: World) -> str:
    """What is looked at."""
    return f"{world.size} rank(s), {world.local_size} of them on {socket.gethostname()}"


def speak(world: World, *lines: str) -> None:
    """Print lines on rank 0."""
    if world.is_main:
        print(*lines, sep="\n", flush=True)


def leave_together(store: Any, world: World) -> None:
    """Let no rank end before rank 0 has said all: with the first one that fails, a launcher ends the others.

    And let rank 0 end last, for it may hold the store.
    """
    others = [f"doctor/gone/{rank}" for rank in range(1, world.size)]
    with suppress(RuntimeError):  # Whoever is not there any more has been heard already.
        if world.is_main:
            store.set("doctor/said", "")
            store.wait(others, timedelta(seconds=10))
        else:
            store.wait(["doctor/said"])
            store.set(others[world.rank - 1], "")


def first_line(error: Exception) -> str:
    """The first line of an error's text, which says what happened; PyTorch's have stack traces below."""
    return next(iter(str(error).splitlines()), type(error).__name__)
