"""Which process of a run this is, according to its launcher's environment variables.

started by                   rank, world size, ...                    rendezvous on several machines (on one: 127.0.0.1)
torchrun, or compatible      RANK, WORLD_SIZE, LOCAL_RANK, ...        MASTER_ADDR and MASTER_PORT
srun                         SLURM_PROCID, SLURM_STEP_NUM_TASKS, ...  first host of the step, port from the job's id
mpirun (Open MPI)            OMPI_COMM_WORLD_RANK, ...                MASTER_ADDR, port from the job's name
mpiexec (MPICH, Intel MPI)   PMI_RANK, MPI_LOCALRANKID, ...           MASTER_ADDR, port 29500
nothing                      the only process of its run              none needed
"""

import os
import re
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from ..config import UserError

Env = Mapping[str, str]
LONGEST_LINE = 1000


@dataclass(frozen=True)
class ProcessInfo:
    """One process of a run."""

    rank: int = 0  # Its number in the run.
    local_rank: int = 0  # Its number on this machine.
    world_size: int = 1  # Processes in the run.
    local_world_size: int = 1  # Processes on this machine.
    launcher: str = "none"  # torchrun (or whatever sets its variables), srun, mpirun or none.
    rendezvous: str | None = None  # host:port of rank 0; None if MASTER_ADDR and MASTER_PORT hold it.


def find_process_info(env: Env = os.environ) -> ProcessInfo:
    """Return which process this is; rejects variables that are incomplete or contradict each other.

    If one launcher runs inside another, the inner one counts: torchrun in a Slurm task, or ``mpirun``, which may have
    started its processes through ``srun``.
    """
    for variable, read in LAUNCHERS.items():
        if variable in env:
            try:
                info = read(env)
            except (LookupError, ValueError) as error:
                message = f"{variable} is set, but the launcher's other variables do not match it: {error}"
                raise UserError(message) from None
            local_rank, local_world_size = info.local_rank, info.local_world_size
            is_possible = 0 <= local_rank <= info.rank < info.world_size and local_rank < local_world_size
            others = info.world_size - local_world_size  # Processes on other machines.
            if not is_possible or others < 0 or (others == 0 and local_rank != info.rank):
                raise UserError(f"{variable} is set, but the launcher's variables contradict each other: {info}")
            if variable == "RANK":
                check_others(info, env)
            return info
    if (env.get("WORLD_SIZE") or "1") != "1":
        raise UserError(f"WORLD_SIZE is {env['WORLD_SIZE']}, but RANK is not set; set both, or neither for one process")
    return ProcessInfo()


def check_others(info: ProcessInfo, env: Env) -> None:
    """Reject a RANK that was set by hand if another launcher started several processes: all of them would be that one.

    A launcher inside another sets LOCAL_WORLD_SIZE as well.
    """
    for variable, read in LAUNCHERS.items():
        other = info
        with suppress(LookupError, ValueError, UserError):
            other = read(env) if variable in env and "LOCAL_WORLD_SIZE" not in env else info
        if other.world_size > 1 and (other.rank, other.world_size) != (info.rank, info.world_size):
            raise UserError(
                f"RANK and WORLD_SIZE say rank {info.rank} of {info.world_size}, and {variable} and the variables with "
                f"it say rank {other.rank} of {other.world_size}; unset those that do not count"
            )


def read_torchrun(env: Env) -> ProcessInfo:
    """Read torchrun's variables, which may also be set by hand; without the local ones, assume one machine."""
    rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
    local_rank, local_world_size = int(env.get("LOCAL_RANK", rank)), int(env.get("LOCAL_WORLD_SIZE", world_size))
    return ProcessInfo(rank, local_rank, world_size, local_world_size, "torchrun")


def read_srun(env: Env) -> ProcessInfo:
    """Read ``srun``'s variables: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES."""
    world_size = int(env["SLURM_STEP_NUM_TASKS"])
    local_world_size = tasks_on_node(env["SLURM_STEP_TASKS_PER_NODE"], int(env["SLURM_NODEID"]), world_size)
    host = "127.0.0.1" if local_world_size == world_size else first_host(env["SLURM_STEP_NODELIST"])
    # Each step of each job gets a port of its own.
    rendezvous = build_rendezvous(env, host, port_for(f"{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}"))
    rank, local_rank = int(env["SLURM_PROCID"]), int(env["SLURM_LOCALID"])
    return ProcessInfo(rank, local_rank, world_size, local_world_size, "srun", rendezvous)


def read_mpi(env: Env, names: Sequence[str], job: str | None = None) -> ProcessInfo:
    """Read the variables of an ``mpirun``, which do not include the address of rank 0; ``job`` is the job's name."""
    rank, local_rank, world_size, local_world_size = (int(env[name]) for name in names)
    on_one_machine = local_world_size == world_size
    if not (on_one_machine or "MASTER_ADDR" in env):
        raise UserError("mpirun started ranks on several machines: name that of rank 0, as in -x MASTER_ADDR=HOST")
    # Ranks of a job without a name have the same parent on one machine; on several, nothing distinguishes two jobs.
    job = job or (str(os.getppid()) if on_one_machine else None)
    rendezvous = build_rendezvous(env, "127.0.0.1", port_for(job) if job else 29500)
    return ProcessInfo(rank, local_rank, world_size, local_world_size, "mpirun", rendezvous)


# Open MPI: https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html
OPEN_MPI = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")]
# Hydra, the mpiexec of MPICH and Intel MPI.
HYDRA = ["PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"]
# The variable that identifies each launcher, and how to read the others; the first one that is set counts.
# SLURM_STEP_NUM_TASKS is set for what srun starts, but not for a batch script, which is one process.
LAUNCHERS: dict[str, Callable[[Env], ProcessInfo]] = {
    "RANK": read_torchrun,
    "OMPI_COMM_WORLD_RANK": lambda env: read_mpi(env, OPEN_MPI, env.get("PMIX_NAMESPACE")),
    "MPI_LOCALRANKID": lambda env: read_mpi(env, HYDRA),
    "SLURM_STEP_NUM_TASKS": read_srun,
}


def build_rendezvous(env: Env, host: str, port: int) -> str:
    """Return ``host:port``; MASTER_ADDR and MASTER_PORT take precedence."""
    given = env.get("MASTER_PORT", str(port))
    if not is_port(given):
        raise ValueError(f"MASTER_PORT is '{given}'")
    return f"{env.get('MASTER_ADDR', host)}:{given}"


def is_port(text: str) -> bool:
    """Return whether a variable's value is the number of a port."""
    return text.isdecimal() and 0 < int(text) < 2**16


def port_for(job: str) -> int:
    """Return a port below the ephemeral ports, the same on all ranks of ``job``."""
    return 20000 + zlib.crc32(job.encode()) % 12000


def tasks_on_node(text: str, node: int, world_size: int) -> int:
    """Return the number of tasks on a node from Slurm's counts: ``2(x3),1`` stands for 2, 2, 2 and 1."""
    counts = [(int(tasks), int(times or 1)) for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?(?:,|$)", text)]
    if node < 0 or sum(tasks * times for tasks, times in counts) != world_size:
        raise ValueError(f"node {node} of {text} tasks, {world_size} in all")
    first = 0  # Node that a count begins with.
    for tasks, times in counts:
        if node < first + times:
            return tasks
        first += times
    raise ValueError(f"no node {node} in {text}")


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's node list: ``n07`` of ``n[07-09,12],login``."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\])?([^\[,]*)", nodes)
    if match is None:
        raise ValueError(f"no node in {nodes!r}")
    return "".join(part or "" for part in match.groups())


@dataclass(frozen=True)
class Nodes:
    """The machines of a run: how many, which one this is (from 0), and the rendezvous on the first one."""

    count: int = 1
    rank: int = 0
    head: str = "127.0.0.1"
    port: int = 0  # The system chooses a free one.


def read_nodes(env: Env = os.environ) -> Nodes:
    """Return the machines of this run: one, unless NODES is set, which requires NODE_RANK, HEAD and PORT."""
    if (env.get("NODES") or "1") == "1":
        return Nodes()
    try:
        given = {name: env[name] for name in ("NODES", "NODE_RANK", "HEAD", "PORT")}
    except KeyError as error:
        raise UserError(f"NODES is '{env['NODES']}', but {error} is not set; set it, or unset NODES") from None
    count, rank = (int(given[name]) if given[name].isdecimal() else -1 for name in ("NODES", "NODE_RANK"))
    if not (0 <= rank < count and is_port(given["PORT"])):
        shown = ", ".join(f"{name} is {value!r}" for name, value in given.items())
        raise UserError(
            f"{shown}; give how many machines there are, the number of this one (from 0), and the first one's address "
            "and a port of it"
        )
    return Nodes(count, rank, given["HEAD"], int(given["PORT"]))


def is_restart(env: Env = os.environ) -> bool:
    """Return whether this job has started this process before; not every rank may know, so ask all of them."""
    counts = {name: env.get(name) or "0" for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")}
    for name, count in counts.items():
        if not count.isdecimal():
            raise UserError(f"{name} is '{count}'; unset it, or give a number")
    return any(int(count) for count in counts.values())


def is_first_on_machine(env: Env = os.environ) -> bool:
    """Return whether this process is local rank 0, or has no local rank."""
    names = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
    return next((env[name] for name in names if name in env), "0") == "0"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def exit_with_error(message: str, *, only_this_rank: bool = False) -> NoReturn:
    """Print an error on stderr, once per machine or, for an error of ``only_this_rank``, on it; exit with code 2."""
    print_error(message, only_this_rank=only_this_rank)
    sys.exit(2)


def print_error(message: str, *, only_this_rank: bool = False) -> None:
    """Print what ``exit_with_error`` prints."""
    if only_this_rank or is_first_on_machine():
        line = " ".join(message.split())
        if len(line) > LONGEST_LINE:  # It repeats what was given.
            line = f"{line[: LONGEST_LINE // 2]} ... {line[-LONGEST_LINE // 2 :]}"
        print("error:", line, file=sys.stderr)
