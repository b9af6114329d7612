"""What each launcher says about a process is understood, and contradictions are rejected."""

import pytest

from support import module

environment = module("launch.environment")
UserError = module("config").UserError

# The second of three processes, the first of two on the second of two machines.
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1,2",
    "SLURM_STEP_NODELIST": "n[07-08]",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "77",
    "MASTER_ADDR": "n07",
}
HYDRA = {
    "PMI_RANK": "1",
    "PMI_SIZE": "3",
    "MPI_LOCALRANKID": "0",
    "MPI_LOCALNRANKS": "2",
    "MASTER_ADDR": "n07",
}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("variables", "launcher"), [(SRUN, "srun"), (OPEN_MPI, "mpirun"), (HYDRA, "mpirun"), (TORCHRUN, "torchrun")]
)
def test_a_process_finds_its_rank(variables: dict[str, str], launcher: str) -> None:
    info = environment.find_process_info(variables)
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (1, 3, 0, 2)
    assert info.launcher == launcher
    if launcher == "torchrun":
        assert info.rendezvous is None
    else:
        host, port = info.rendezvous.split(":")
        assert host == "n07"
        assert 1024 < int(port) < 32768


def test_the_default_port_of_an_mpi_job() -> None:
    unnamed = {key: value for key, value in OPEN_MPI.items() if key != "PMIX_NAMESPACE"}
    for variables in (unnamed, HYDRA | {"PMIX_NAMESPACE": "that of an outer launcher"}):
        assert environment.find_process_info(variables).rendezvous == "n07:29500"


def test_a_launcher_inside_another_counts() -> None:
    info = environment.find_process_info(TORCHRUN | SRUN | {"SLURM_PROCID": "0"})
    assert (info.rank, info.launcher) == (1, "torchrun")
    by_hand = {"RANK": "1", "WORLD_SIZE": "3"}
    assert environment.find_process_info(by_hand | SRUN).launcher == "torchrun"


def test_a_process_without_a_launcher_is_alone() -> None:
    in_a_batch_script = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    alone = environment.ProcessInfo()
    assert environment.find_process_info({}) == environment.find_process_info(in_a_batch_script) == alone


def test_jobs_have_ports_of_their_own() -> None:
    jobs = [SRUN | {"SLURM_JOB_ID": str(job)} for job in range(20)]
    assert len({environment.find_process_info(job).rendezvous for job in jobs}) == 20
    chosen = environment.find_process_info(SRUN | {"MASTER_ADDR": "there", "MASTER_PORT": "1234"})
    assert chosen.rendezvous == "there:1234"


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        (TORCHRUN | {"RANK": "3"}, "RANK"),
        (TORCHRUN | {"WORLD_SIZE": "many"}, "many"),
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}, "contradict"),
        (TORCHRUN | {"RANK": "0", "LOCAL_RANK": "1"}, "contradict"),
        ({"RANK": "0", "WORLD_SIZE": "1"} | OPEN_MPI, "rank 0 of 1, and OMPI_COMM_WORLD_RANK .* rank 1 of 3"),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS"),
        (SRUN | {"SLURM_NODEID": "-1"}, "SLURM_STEP_NUM_TASKS"),
        ({key: value for key, value in OPEN_MPI.items() if key != "MASTER_ADDR"}, "MASTER_ADDR"),
        ({key: value for key, value in SRUN.items() if key != "SLURM_NODEID"}, "SLURM_NODEID"),
    ],
)
def test_contradictions_are_rejected(variables: dict[str, str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        environment.find_process_info(variables)


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_a_launcher_says_whether_it_restarted_the_job(variable: str) -> None:
    assert environment.is_restart({variable: "1"})
    assert not any(environment.is_restart(variables) for variables in ({variable: "0"}, {variable: ""}, {}))


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("n1", "n1"), ("n[1-2,5]", "n1"), ("gpu-a[007-012]", "gpu-a007"), ("a,b", "a"), ("r[1-2]-ib,x", "r1-ib")],
)
def test_the_first_host_of_a_job(nodes: str, host: str) -> None:
    assert environment.first_host(nodes) == host


def test_tasks_on_a_node() -> None:
    assert [environment.tasks_on_node("2(x3),1", node, 7) for node in range(4)] == [2, 2, 2, 1]
    for text, node, world_size in (("2(x3),1", 4, 7), ("2(x3),1", -1, 7), ("2(x3),1", 0, 8), ("x", 0, 1), ("", 0, 0)):
        with pytest.raises(ValueError, match="node"):
            environment.tasks_on_node(text, node, world_size)
