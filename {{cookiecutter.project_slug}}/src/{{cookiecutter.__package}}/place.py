"""Which of all the processes this one is: what its launcher says in the environment.

torchrun and ``launch.py`` speak PyTorch's own words (RANK, WORLD_SIZE, ...). ``srun`` and ``mpirun`` number their
processes in words of their own, and leave it to them where to meet. A process that nobody numbered is alone.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from .config import UserError


@dataclass(frozen=True)
class Place:
    """The place of a process among all.

    Attributes:
        rank: Number of this process among all, from 0.
        local_rank: Number of this process among those on its machine, from 0.
        size: Number of processes (the world size).
        local_size: Number of processes on this machine.
        launcher: What started it: ``torchrun`` (or whatever sets its variables), ``srun``, ``mpirun``, or ``none``.
        meeting: Host and port at which rank 0 waits for the others; None where the launcher says it in MASTER_ADDR
            and MASTER_PORT.
    """

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1
    launcher: str = "none"
    meeting: str | None = None


def find_place(environment: Mapping[str, str] = os.environ) -> Place:
    """This process's place.

    A launcher inside another one counts: torchrun in a Slurm task, or ``mpirun``, whose processes ``srun`` may start.

    Raises:
        UserError: if a launcher's variables are incomplete or contradict each other.
    """
    for mark, read in LAUNCHERS.items():
        if mark in environment:
            try:
                place = read(environment)
            except (KeyError, ValueError) as error:
                raise UserError(f"{mark} is set, but the launcher's other variables do not fit it: {error}") from None
            if not (0 <= place.rank < place.size and 0 <= place.local_rank < place.local_size <= place.size):
                raise UserError(f"{mark} is set, but the launcher's variables contradict each other: {place}")
            return place
    return Place()


def from_torchrun(env: Mapping[str, str]) -> Place:
    """torchrun, ``launch.py``, and ranks started by hand: one machine, unless they say how many ranks it has."""
    rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
    local_rank, local_size = int(env.get("LOCAL_RANK", rank)), int(env.get("LOCAL_WORLD_SIZE", size))
    return Place(rank, local_rank, size, local_size, "torchrun")


def from_srun(env: Mapping[str, str]) -> Place:
    """``srun``: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES."""
    rank, size = int(env["SLURM_PROCID"]), int(env["SLURM_STEP_NUM_TASKS"])
    local_size = tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"])[int(env["SLURM_NODEID"])]
    host = "127.0.0.1" if local_size == size else first_host(env["SLURM_STEP_NODELIST"])
    # Every step of every job meets at a port of its own.
    port = port_from(f"{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}")
    return Place(rank, int(env["SLURM_LOCALID"]), size, local_size, "srun", meeting(env, host, port))


def from_open_mpi(env: Mapping[str, str]) -> Place:
    """Open MPI's ``mpirun``: https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html."""
    rank, size = int(env["OMPI_COMM_WORLD_RANK"]), int(env["OMPI_COMM_WORLD_SIZE"])
    local_rank, local_size = int(env["OMPI_COMM_WORLD_LOCAL_RANK"]), int(env["OMPI_COMM_WORLD_LOCAL_SIZE"])
    port = port_from(env.get("PMIX_NAMESPACE", str(os.getppid())))
    return Place(rank, local_rank, size, local_size, "mpirun", meeting(env, mpi_host(env, local_size, size), port))


def from_hydra(env: Mapping[str, str]) -> Place:
    """The ``mpiexec`` of MPICH and Intel MPI."""
    rank, size = int(env["PMI_RANK"]), int(env["PMI_SIZE"])
    local_rank, local_size = int(env["MPI_LOCALRANKID"]), int(env["MPI_LOCALNRANKS"])
    # On one machine all have the same parent; on several nothing tells two jobs apart.
    port = port_from(str(os.getppid())) if local_size == size else 29500
    return Place(rank, local_rank, size, local_size, "mpirun", meeting(env, mpi_host(env, local_size, size), port))


# A variable that tells the launcher, and how to read the others. The first that is there counts. SLURM_STEP_NUM_TASKS
# is there in what srun started, but not in a batch script, which is one process however many tasks the job may have.
LAUNCHERS = {
    "RANK": from_torchrun,
    "OMPI_COMM_WORLD_RANK": from_open_mpi,
    "MPI_LOCALRANKID": from_hydra,
    "SLURM_STEP_NUM_TASKS": from_srun,
}


def meeting(env: Mapping[str, str], host: str, port: int) -> str:
    """Where the ranks meet; MASTER_ADDR and MASTER_PORT have the last word."""
    return f"{env.get('MASTER_ADDR', host)}:{env.get('MASTER_PORT', port)}"


def mpi_host(env: Mapping[str, str], local_size: int, size: int) -> str:
    """The machine of rank 0, of which MPI's launchers say nothing.

    Raises:
        UserError: if there are several machines, and MASTER_ADDR does not say it.
    """
    if local_size < size and "MASTER_ADDR" not in env:
        raise UserError("mpirun started ranks on several machines: name that of rank 0, as in -x MASTER_ADDR=HOST")
    return "127.0.0.1"


def port_from(name: str) -> int:
    """A port for the job ``name``: the same on all its ranks, below those that the system gives to others."""
    return 20000 + zlib.crc32(name.encode()) % 12000


def tasks_per_node(text: str) -> list[int]:
    """Slurm's counts, ``2(x3),1``, as a number a node: ``[2, 2, 2, 1]``."""
    counts = (re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(","))
    return [int(count[1]) for count in counts if count for _ in range(int(count[2] or 1))]


def first_host(nodes: str) -> str:
    """The first of Slurm's list of nodes: ``n07`` of ``n[07-09,12],login``."""
    found = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\])?([^\[,]*)", nodes)
    if found is None:
        raise ValueError(f"no node in {nodes!r}")
    return "".join(part or "" for part in found.groups())
