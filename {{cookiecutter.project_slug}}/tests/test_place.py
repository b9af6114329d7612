"""What each launcher says of a process is understood, and what contradicts itself is refused."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from support import PACKAGE

place: Any = import_module(f"{PACKAGE}.place")

# The second of three tasks on the first of two machines, as srun, mpirun and mpiexec say it.
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "n[07-08]",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "77",
    "MASTER_ADDR": "n07",
}
HYDRA = {
    "PMI_RANK": "1",
    "PMI_SIZE": "3",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "MASTER_ADDR": "n07",
}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environment", "launcher"), [(SRUN, "srun"), (OPEN_MPI, "mpirun"), (HYDRA, "mpirun"), (TORCHRUN, "torchrun")]
)
def test_a_process_finds_its_place(environment: dict[str, str], launcher: str) -> None:
    found = place.find_place(environment)
    assert (found.rank, found.size, found.local_rank, found.local_size) == (1, 3, 1, 2)
    assert found.launcher == launcher
    if launcher == "torchrun":
        assert found.meeting is None
    else:
        host, port = found.meeting.split(":")
        assert host == "n07"
        assert 1024 < int(port) < 32768


def test_a_process_that_nobody_numbered_is_alone() -> None:
    in_a_batch_script = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    assert place.find_place({}) == place.find_place(in_a_batch_script) == place.Place()


def test_jobs_meet_at_ports_of_their_own() -> None:
    found = {place.find_place(SRUN | {"SLURM_JOB_ID": str(job)}).meeting for job in range(20)}
    assert len(found) == 20
    chosen = place.find_place(SRUN | {"MASTER_ADDR": "there", "MASTER_PORT": "1234"})
    assert chosen.meeting == "there:1234"


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        (TORCHRUN | {"RANK": "3"}, "RANK"),
        (TORCHRUN | {"WORLD_SIZE": "many"}, "many"),
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({key: value for key, value in OPEN_MPI.items() if key != "MASTER_ADDR"}, "MASTER_ADDR"),
        ({key: value for key, value in SRUN.items() if key != "SLURM_NODEID"}, "SLURM_NODEID"),
    ],
)
def test_what_does_not_fit_is_refused(environment: dict[str, str], named: str) -> None:
    with pytest.raises(Exception, match=named):
        place.find_place(environment)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("n1", "n1"), ("n[1-2,5]", "n1"), ("gpu-a[007-012]", "gpu-a007"), ("a,b", "a"), ("r[1-2]-ib,x", "r1-ib")],
)
def test_the_first_host_of_a_job(nodes: str, host: str) -> None:
    assert place.first_host(nodes) == host


def test_tasks_per_node() -> None:
    assert place.tasks_per_node("2(x3),1") == [2, 2, 2, 1]
