"""The doctor of a rendered project: a healthy machine passes, and each planted fault fails the row that checks it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from conftest import Bake, run
from machines import Machines, start_on_both
from runs import free_port, launch, started, taken_port

pytestmark = pytest.mark.slow

ON_CPU = ("--distributed.device", "cpu")
# Run a command with its own mounts and host name, as on another machine. Root is not needed if the kernel allows it.
OWN_NAMESPACES = ("unshare", "--map-root-user", "--mount", "--uts")
needs_namespaces = pytest.mark.skipif(
    sys.platform != "linux" or subprocess.run([*OWN_NAMESPACES, "true"], capture_output=True).returncode != 0,
    reason="this kernel or this user may not make namespaces (unshare --map-root-user --mount --uts)",
)
ROW = re.compile(r"^(\S.*?) +(pass|warn|fail)  (.*)$", re.MULTILINE)
# Rows that may warn on a machine that can train.
MAY_WARN = {"/dev/shm", "open files", "host name", "disk"}


@pytest.fixture(scope="module", autouse=True)
def no_nccl_variables() -> Iterator[None]:
    """An environment without the variables of NCCL, gloo and the rendezvous."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [*os.environ]:
            if name.startswith(("NCCL_", "GLOO_", "MASTER_")):
                patch.delenv(name)
        yield


def rows_of(output: str) -> dict[str, list[tuple[str, str]]]:
    """Return the states and findings of each row by name; a row has several if the findings of the ranks differ."""
    rows: dict[str, list[tuple[str, str]]] = {}
    for name, state, finding in ROW.findall(output):
        rows.setdefault(name, []).append((state, finding))
    return rows


def states_of(output: str) -> dict[str, set[str]]:
    """Return the states of each row by name."""
    return {name: {state for state, _ in rows} for name, rows in rows_of(output).items()}


def doctor_command(*arguments: str | Path, prefix: tuple[str | Path, ...] = ()) -> list[str | Path]:
    """Return the command line of the doctor in one process, after ``prefix``."""
    return [*prefix, sys.executable, "-m", "my_experiment", "doctor", *ON_CPU, *arguments]


def run_doctor(
    project: Path, *arguments: str | Path, prefix: tuple[str | Path, ...] = (), expect: int = 1, **environment: str
) -> dict[str, set[str]]:
    """Run the doctor in one process, and return the states of each row by name."""
    result = run(
        *doctor_command(*arguments, prefix=prefix), cwd=project, PYTHONPATH="src", expect=expect, **environment
    )
    assert "Traceback" not in result.stderr, result.stderr
    return states_of(result.stdout)


def failed_rows(rows: dict[str, set[str]]) -> set[str]:
    """Return the names of the failed rows."""
    return {name for name, states in rows.items() if "fail" in states}


@pytest.mark.parametrize("nproc", [1, 3])
def test_a_healthy_machine_passes(plain: Path, tmp_path: Path, nproc: int) -> None:
    """Two ranks, under both launchers and every strategy, are in test_matrix.py."""
    arguments = ("--run.dir", tmp_path / "run", "--data.global_batch_size", "66", *ON_CPU)
    result = launch(plain, "doctor", *arguments, nproc=nproc)
    table = rows_of(result.stdout)
    assert {"versions", "device", "backend", "/dev/shm", "open files", "host name", "rendezvous"} <= table.keys()
    assert {"gloo interface", "clocks", "run.dir", "disk", "driver", "NCCL variables", "point to point"} <= table.keys()
    assert all(row[0] == "pass" for name, rows in table.items() for row in rows if name not in MAY_WARN), result.stdout
    assert not failed_rows(states_of(result.stdout))
    assert not list(tmp_path.iterdir())
    if nproc > 1:
        check_bandwidth(table["all-reduce of 8 MiB"][0][1], nproc)
        assert table["point to point"][0][1].startswith(f"slowest of {nproc} link(s): ranks ")


def test_ranks_share_the_processors(plain: Path, tmp_path: Path) -> None:
    """Those of a machine that has 14, according to its program ``nproc``."""
    (tmp_path / "nproc").write_text("#!/bin/sh\necho 14\n")
    (tmp_path / "nproc").chmod(0o755)
    # By default, PyTorch's MKL starts no more threads than this machine has processors.
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "", "MKL_DYNAMIC": "FALSE"}
    table = rows_of(launch(plain, "doctor", *ON_CPU, "--run.dir", tmp_path / "run", **environment).stdout)
    assert table["device"][0][1].endswith("2 rank(s) on this machine with 7 thread(s) each")


def check_bandwidth(finding: str, world_size: int) -> None:
    """Check that the measurements of an all-reduce are consistent with the formula of NVIDIA's nccl-tests."""
    numbers = re.fullmatch(
        r"([\d.]+) ms, ([\d.]+) GB/s; x 2\(N-1\)/N = ([\d.]+): ([\d.]+) GB/s on the bus, \d+% of a link", finding
    )
    assert numbers, finding
    milliseconds, bandwidth, factor, bus_bandwidth = map(float, numbers.groups())
    assert factor == round(2 * (world_size - 1) / world_size, 2)
    assert bandwidth == pytest.approx(8 * 2**20 / milliseconds / 1e6, abs=0.01, rel=0.01)
    assert bus_bandwidth == pytest.approx(bandwidth * factor, abs=0.02)


@pytest.mark.parametrize(
    ("arguments", "environment", "rows"),
    [
        ("--run.dir /proc/nowhere", {}, {"run.dir"}),
        ("--distributed.init_method tcp://no-such-host.invalid:29500", {}, {"rendezvous"}),
        ("", {"GLOO_SOCKET_IFNAME": "nope0"}, {"gloo interface"}),
        ("--distributed.backend nccl", {"NCCL_BUFFSIZE": "4M"}, {"backend", "NCCL_BUFFSIZE"}),
        ("--distributed.backend nccl", {"NCCL_SOCKET_IFNAME": "=nope0"}, {"backend", "NCCL interface"}),
    ],
    ids=[
        "unwritable directory",
        "wrong host name",
        "no such interface",
        "no GPU, and a wrong value for NCCL",
        "no such interface for NCCL",
    ],
)
def test_a_wrong_setting_fails_the_row_that_checks_it(
    plain: Path, tmp_path: Path, arguments: str, environment: dict[str, str], rows: set[str]
) -> None:
    assert failed_rows(run_doctor(plain, "--run.dir", tmp_path / "run", *arguments.split(), **environment)) == rows
    assert not list(tmp_path.iterdir())


def test_a_port_in_use_fails_the_rendezvous_row(plain: Path, tmp_path: Path) -> None:
    with taken_port() as port:
        rendezvous = f"tcp://127.0.0.1:{port}"
        rows = run_doctor(plain, "--run.dir", tmp_path, "--distributed.init_method", rendezvous)
    assert failed_rows(rows) == {"rendezvous"}


def test_a_low_limit_of_open_files_fails_its_row(plain: Path, tmp_path: Path) -> None:
    limited = ("bash", "-c", 'ulimit -n 40; exec "$@"', "-")
    rows = run_doctor(plain, "--run.dir", tmp_path, "--data.num_workers", "2", prefix=limited)
    assert failed_rows(rows) == {"open files"}


def test_a_run_directory_locked_by_another_run_fails_the_run_dir_row(plain: Path, tmp_path: Path) -> None:
    lock = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); "
    with started(sys.executable, "-c", lock + "time.sleep(1000)", tmp_path / ".lock", cwd=tmp_path) as other:
        assert other.stdout and other.stdout.readline()
        assert failed_rows(run_doctor(plain, "--run.dir", tmp_path)) == {"run.dir"}


@needs_namespaces
@pytest.mark.parametrize(
    ("options", "mount_point", "arguments", "row"),
    [
        ("size=64m", "/dev/shm", "--data.num_workers 2", "/dev/shm"),
        ("size=1m", "{run}", "", "disk"),
        ("ro", "{run}", "", "run.dir"),
    ],
    ids=["small /dev/shm", "full disk", "read-only disk"],
)
def test_an_unsuitable_file_system_fails_the_row_that_checks_it(
    plain: Path, tmp_path: Path, options: str, mount_point: str, arguments: str, row: str
) -> None:
    mount = f'mount -t tmpfs -o {options} tmpfs "{mount_point.format(run=tmp_path)}" && exec "$@"'
    rows = run_doctor(
        plain, "--run.dir", tmp_path / "run", *arguments.split(), prefix=(*OWN_NAMESPACES, "bash", "-c", mount, "-")
    )
    assert failed_rows(rows) == {row}


@needs_namespaces
def test_an_unresolvable_host_name_only_warns_on_a_single_machine(plain: Path, tmp_path: Path) -> None:
    renamed = (*OWN_NAMESPACES, "bash", "-c", 'hostname nobody-knows-me; exec "$@"', "-")
    single_machine = run_doctor(plain, "--run.dir", tmp_path, prefix=renamed, expect=0)
    assert single_machine["host name"] == {"warn"}
    rank_0 = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    arguments = ("--run.dir", tmp_path, "--distributed.startup_timeout_seconds", "2")
    rows = run_doctor(plain, *arguments, prefix=renamed, MASTER_PORT=str(free_port()), **rank_0)
    assert failed_rows(rows) == {"host name", "ranks"}  # Rank 1 is never started.


def run_two_ranks(projects: list[Path], commands: list[list[str | Path]], folder: Path) -> list[tuple[int, str]]:
    """Start two ranks without a launcher, wait for them, and return their exit codes and outputs."""
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    environment["PYTHONPATH"] = "src"
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(started(*command, "--run.dir", folder, cwd=project, RANK=str(rank), **environment))
            for rank, (project, command) in enumerate(zip(projects, commands, strict=True))
        ]
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]


def test_different_code_and_versions_fail_the_project_and_versions_rows(
    plain: Path, bake: Bake, tmp_path: Path
) -> None:
    other = bake()
    with open(other / "src" / "my_experiment" / "train.py", "a") as file:
        file.write("# Changed on one machine alone.\n")
    planted = "import runpy, torch; torch.__version__ = '2.0.0'; runpy.run_module('my_experiment', run_name='__main__')"
    other_version: list[str | Path] = [sys.executable, "-c", planted, "doctor", *ON_CPU]
    (code, output), (other_code, other_output) = run_two_ranks(
        [plain, other], [doctor_command(), other_version], tmp_path / "run"
    )
    assert (code, other_code) == (1, 1)
    assert failed_rows(states_of(output)) == {"project", "versions"}
    assert [finding.split(": ")[0] for _, finding in rows_of(output)["versions"]] == ["rank 0", "rank 1"]
    assert len(rows_of(output)["project"]) == 2
    assert other_output == ""


def test_a_rank_with_a_wrong_clock_and_wrong_sums_is_reported(plain: Path, tmp_path: Path) -> None:
    planted = """
import sys, time
import torch.distributed as dist
from my_experiment.__main__ import main
true, add = time.time, dist.all_reduce
time.time = lambda: true() + 90
dist.all_reduce = lambda tensor: (add(tensor), tensor[:1].add_(1))
main(sys.argv[1:])
"""
    faulty: list[str | Path] = [sys.executable, "-c", planted, "doctor", *ON_CPU]
    (code, output), (other_code, _) = run_two_ranks([plain, plain], [doctor_command(), faulty], tmp_path / "run")
    assert (code, other_code) == (1, 1)
    rows: dict[str, Any] = rows_of(output)
    assert failed_rows(states_of(output)) == {"sum over ranks"} and rows["sum over ranks"][0][1] == "wrong on rank 1"
    [(state, finding)] = rows["clocks"]
    assert state == "warn" and float(finding.split()[0]) == pytest.approx(90_000, abs=5_000)


def test_invalid_undocumented_and_discouraged_nccl_variables_warn(plain: Path, tmp_path: Path) -> None:
    variables = {
        "NCCL_DEBUG": "INFO",
        "NCCL_P2P_LEVEL": "FOO",
        "NCCL_ALGO": "ring;allreduce:^tree",
        "NCCL_BUFSIZE": "4194304",
        "NCCL_MAX_NCHANNELS": "4",
        "NCCL_CONF_FILE": str(tmp_path / "nccl.conf"),
    }
    (tmp_path / "nccl.conf").write_text("# a comment\nNCCL_MIN_CTAS=65\nNCCL_DEBUG=nonsense\nNCCL_IB_TC=106\n")
    result = run(*doctor_command("--run.dir", tmp_path / "run"), cwd=plain, PYTHONPATH="src", **variables)
    states = states_of(result.stdout)
    assert {name: state for name, state in states.items() if name.startswith("NCCL_")} == {
        "NCCL_DEBUG": {"pass"},  # The environment takes precedence over the file.
        "NCCL_P2P_LEVEL": {"warn"},
        "NCCL_ALGO": {"warn"},  # Valid, but better left unset.
        "NCCL_BUFSIZE": {"warn"},
        "NCCL_MAX_NCHANNELS": {"warn"},
        "NCCL_CONF_FILE": {"pass"},
        "NCCL_MIN_CTAS": {"warn"},
        "NCCL_IB_TC": {"pass"},
    }
    assert "did you mean NCCL_BUFFSIZE?" in result.stdout and "give 1 to 64" in result.stdout


def test_two_healthy_machines_pass(baked: Bake, machines: Machines, tmp_path: Path) -> None:
    arguments = ("doctor", *ON_CPU, "--run.dir", tmp_path / "run")
    launchers = start_on_both(machines, baked(), *arguments, logs=tmp_path)
    assert [launcher.wait(timeout=300) for launcher in launchers] == [0, 0], (tmp_path / "0.log").read_text()
    rows = rows_of((tmp_path / "0.log").read_text())
    assert rows["gloo interface"] == [("pass", "wire")]
    assert rows["rendezvous"][0][1].startswith(machines[0].address)
    assert {row[0] for row in rows["all-reduce of 8 MiB"]} == {"pass"}
    assert rows_of((tmp_path / "1.log").read_text()) == {}


def test_a_cut_link_fails_the_ranks_row_on_both_machines(baked: Bake, machines: Machines, tmp_path: Path) -> None:
    machines[1].ip("link", "set", "wire", "down")
    arguments = ("doctor", *ON_CPU, "--run.dir", tmp_path / "run", "--distributed.startup_timeout_seconds", "10")
    launchers = start_on_both(machines, baked(launcher="spawn"), *arguments, logs=tmp_path)
    assert [launcher.wait(timeout=300) for launcher in launchers] == [1, 1]
    for log, message in (("0.log", "nothing was heard from rank 1"), ("1.log", "nreachable")):
        [(state, finding)] = rows_of((tmp_path / log).read_text())["ranks"]
        assert state == "fail" and message in finding, finding
