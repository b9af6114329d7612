"""The doctor of a rendered project: a healthy machine passes, and each fault that is seeded here fails its own row."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import Bake, run
from machines import Machines, start_on_both
from runs import launch

pytestmark = pytest.mark.slow

ON_CPU = ("--distributed.device", "cpu")
# A machine of its own, as far as mounts and host name go; everybody may have one where the kernel allows it.
APART = ("unshare", "--map-root-user", "--mount", "--uts")
namespaces = pytest.mark.skipif(
    sys.platform != "linux" or subprocess.run([*APART, "true"], capture_output=True).returncode != 0,
    reason="this kernel or this user may not make namespaces (unshare --map-root-user --mount --uts)",
)
ROW = re.compile(r"^(\S.*?) +(pass|warn|fail)  (.*)$", re.MULTILINE)
# What may be short of good on a machine that trains all the same.
MACHINE = {"/dev/shm", "open files", "host name", "disk"}


@pytest.fixture(scope="module", autouse=True)
def no_nccl_variables() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [*os.environ]:
            if name.startswith(("NCCL_", "GLOO_", "MASTER_")):
                patch.delenv(name)
        yield


def rows_of(output: str) -> dict[str, list[tuple[str, str]]]:
    """State and finding of each row by name; several where ranks found different things."""
    rows: dict[str, list[tuple[str, str]]] = {}
    for name, state, found in ROW.findall(output):
        rows.setdefault(name, []).append((state, found))
    return rows


def states(output: str) -> dict[str, set[str]]:
    return {name: {state for state, _ in rows} for name, rows in rows_of(output).items()}


def command(*words: str | Path, before: tuple[str | Path, ...] = ()) -> list[str | Path]:
    return [*before, sys.executable, "-m", "my_experiment", "doctor", *ON_CPU, *words]


def examine(
    project: Path, *words: str | Path, before: tuple[str | Path, ...] = (), expect: int = 1, **environment: str
) -> dict[str, set[str]]:
    """The states of all rows that one process tells."""
    done = run(*command(*words, before=before), cwd=project, PYTHONPATH="src", expect=expect, **environment)
    assert "Traceback" not in done.stderr, done.stderr
    return states(done.stdout)


def failed(rows: dict[str, set[str]]) -> set[str]:
    return {name for name, found in rows.items() if "fail" in found}


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def free_port() -> str:
    with taken_port() as port:
        return str(port)


@pytest.mark.parametrize(
    ("launcher", "nproc"), [("torchrun", 1), ("torchrun", 3), ("spawn", 2)], ids=lambda value: str(value)
)
def test_a_healthy_machine_passes(baked: Bake, tmp_path: Path, launcher: str, nproc: int) -> None:
    words = ("--run.dir", tmp_path / "run", "--data.global_batch_size", "66", *ON_CPU)
    done = launch(baked(launcher=launcher), "doctor", *words, nproc=nproc)
    found = rows_of(done.stdout)
    assert {"versions", "device", "backend", "/dev/shm", "open files", "host name", "meeting point"} <= found.keys()
    assert {"gloo interface", "clocks", "run.dir", "disk", "driver", "NCCL variables", "point to point"} <= found.keys()
    assert all(row[0] == "pass" for name, rows in found.items() for row in rows if name not in MACHINE), done.stdout
    assert not failed(states(done.stdout))
    assert not list(tmp_path.iterdir())
    if nproc > 1:
        check_bandwidth(found["all-reduce of 8 MiB"][0][1], nproc)
        links = nproc if nproc > 2 else 1
        assert found["point to point"][0][1].startswith(f"slowest of {links} link(s): ranks ")


def check_bandwidth(told: str, ranks: int) -> None:
    """The figures of an all-reduce belong together, by the formula of NVIDIA's nccl-tests."""
    numbers = re.fullmatch(
        r"([\d.]+) ms, ([\d.]+) GB/s; x 2\(N-1\)/N = ([\d.]+): ([\d.]+) GB/s on the bus, \d+% of a link", told
    )
    assert numbers, told
    milliseconds, speed, factor, bus = map(float, numbers.groups())
    assert factor == round(2 * (ranks - 1) / ranks, 2)
    assert speed == pytest.approx(8 * 2**20 / milliseconds / 1e6, abs=0.01, rel=0.01)
    assert bus == pytest.approx(speed * factor, abs=0.02)


@pytest.mark.parametrize(
    ("words", "environment", "rows"),
    [
        ("--run.dir /proc/nowhere", {}, {"run.dir"}),
        ("--distributed.init_method tcp://no-such-host.invalid:29500", {}, {"meeting point"}),
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
def test_a_fault_fails_its_row(
    plain: Path, tmp_path: Path, words: str, environment: dict[str, str], rows: set[str]
) -> None:
    assert failed(examine(plain, "--run.dir", tmp_path / "run", *words.split(), **environment)) == rows
    assert not list(tmp_path.iterdir())


def test_a_port_that_is_taken(plain: Path, tmp_path: Path) -> None:
    with taken_port() as port:
        place = f"tcp://127.0.0.1:{port}"
        rows = examine(plain, "--run.dir", tmp_path, "--distributed.init_method", place)
    assert failed(rows) == {"meeting point"}


def test_a_limit_of_open_files_that_loader_processes_exceed(plain: Path, tmp_path: Path) -> None:
    limited = ("bash", "-c", 'ulimit -n 40; exec "$@"', "-")
    rows = examine(plain, "--run.dir", tmp_path, "--data.num_workers", "2", before=limited)
    assert failed(rows) == {"open files"}


def test_a_run_directory_that_another_run_has(plain: Path, tmp_path: Path) -> None:
    hold = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    words = [sys.executable, "-c", hold, str(tmp_path / ".lock")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout and other.stdout.readline()
        assert failed(examine(plain, "--run.dir", tmp_path)) == {"run.dir"}
        other.communicate(b"\n")


@namespaces
@pytest.mark.parametrize(
    ("options", "place", "words", "row"),
    [
        ("size=64m", "/dev/shm", "--data.num_workers 2", "/dev/shm"),
        ("size=1m", "{run}", "", "disk"),
        ("ro", "{run}", "", "run.dir"),
    ],
    ids=["small /dev/shm", "full disk", "read-only disk"],
)
def test_a_file_system_that_does_not_do(
    plain: Path, tmp_path: Path, options: str, place: str, words: str, row: str
) -> None:
    mount = f'mount -t tmpfs -o {options} tmpfs "{place.format(run=tmp_path)}" && exec "$@"'
    rows = examine(plain, "--run.dir", tmp_path / "run", *words.split(), before=(*APART, "bash", "-c", mount, "-"))
    assert failed(rows) == {row}


@namespaces
def test_a_host_name_that_no_other_machine_can_reach(plain: Path, tmp_path: Path) -> None:
    named = (*APART, "bash", "-c", 'hostname nobody-knows-me; exec "$@"', "-")
    alone = examine(plain, "--run.dir", tmp_path, before=named, expect=0)
    assert alone["host name"] == {"warn"}
    first = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    words = ("--run.dir", tmp_path, "--distributed.startup_timeout_seconds", "2")
    rows = examine(plain, *words, before=named, MASTER_PORT=free_port(), **first)
    assert failed(rows) == {"host name", "ranks"}  # The second rank was never started.


def both(projects: list[Path], commands: list[list[str | Path]], folder: Path) -> list[tuple[int, str]]:
    """Exit code and output of two ranks that are started by hand."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*words, "--run.dir", str(folder)],
            cwd=project,
            env=os.environ | place | {"RANK": str(rank), "PYTHONPATH": "src"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, (project, words) in enumerate(zip(projects, commands, strict=True))
    ]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]


def test_ranks_of_different_code_and_versions(plain: Path, bake: Bake, tmp_path: Path) -> None:
    other = bake()
    with open(other / "src" / "my_experiment" / "train.py", "a") as loop:
        loop.write("# Changed on one machine alone.\n")
    planted = "import runpy, torch; torch.__version__ = '2.0.0'; runpy.run_module('my_experiment', run_name='__main__')"
    older: list[str | Path] = [sys.executable, "-c", planted, "doctor", *ON_CPU]
    (code, output), (other_code, other_output) = both([plain, other], [command(), older], tmp_path / "run")
    assert (code, other_code) == (1, 1)
    assert failed(states(output)) == {"project", "versions"}
    assert [told.split(": ")[0] for _, told in rows_of(output)["versions"]] == ["rank 0", "rank 1"]
    assert len(rows_of(output)["project"]) == 2
    assert other_output == ""


def test_a_rank_with_a_wrong_clock_that_adds_up_wrongly(plain: Path, tmp_path: Path) -> None:
    planted = """
import sys, time
import torch.distributed as dist
from my_experiment.__main__ import main
true, add = time.time, dist.all_reduce
time.time = lambda: true() + 90
dist.all_reduce = lambda tensor: (add(tensor), tensor[:1].add_(1))
main(sys.argv[1:])
"""
    wrong: list[str | Path] = [sys.executable, "-c", planted, "doctor", *ON_CPU]
    (code, output), (other_code, _) = both([plain, plain], [command(), wrong], tmp_path / "run")
    assert (code, other_code) == (1, 1)
    found: dict[str, Any] = rows_of(output)
    assert failed(states(output)) == {"sum over ranks"} and found["sum over ranks"][0][1] == "wrong on rank 1"
    [(state, told)] = found["clocks"]
    assert state == "warn" and float(told.split()[0]) == pytest.approx(90_000, abs=5_000)


def test_what_nvidia_does_not_document_is_told(plain: Path, tmp_path: Path) -> None:
    set_so = {
        "NCCL_DEBUG": "INFO",
        "NCCL_P2P_LEVEL": "FOO",
        "NCCL_ALGO": "ring;allreduce:^tree",
        "NCCL_BUFSIZE": "4194304",
        "NCCL_MAX_NCHANNELS": "4",
        "NCCL_CONF_FILE": str(tmp_path / "nccl.conf"),
    }
    (tmp_path / "nccl.conf").write_text("# a comment\nNCCL_MIN_CTAS=65\nNCCL_DEBUG=nonsense\nNCCL_IB_TC=106\n")
    done = run(*command("--run.dir", tmp_path / "run"), cwd=plain, PYTHONPATH="src", **set_so)
    found = states(done.stdout)
    assert {name: state for name, state in found.items() if name.startswith("NCCL_")} == {
        "NCCL_DEBUG": {"pass"},  # The environment goes before the file.
        "NCCL_P2P_LEVEL": {"warn"},
        "NCCL_ALGO": {"warn"},  # Right, and to be left alone.
        "NCCL_BUFSIZE": {"warn"},
        "NCCL_MAX_NCHANNELS": {"warn"},
        "NCCL_CONF_FILE": {"pass"},
        "NCCL_MIN_CTAS": {"warn"},
        "NCCL_IB_TC": {"pass"},
    }
    assert "is NCCL_BUFFSIZE meant?" in done.stdout and "give 1 to 64" in done.stdout


def test_two_machines(baked: Bake, machines: Machines, tmp_path: Path) -> None:
    words = ("doctor", *ON_CPU, "--run.dir", tmp_path / "run")
    launchers = start_on_both(machines, baked(), *words, logs=tmp_path)
    assert [launcher.wait(timeout=300) for launcher in launchers] == [0, 0], (tmp_path / "0.log").read_text()
    found = rows_of((tmp_path / "0.log").read_text())
    assert found["gloo interface"] == [("pass", "wire")]
    assert found["meeting point"][0][1].startswith(machines[0].address)
    assert {row[0] for row in found["all-reduce of 8 MiB"]} == {"pass"}
    assert rows_of((tmp_path / "1.log").read_text()) == {}


def test_two_machines_whose_link_is_cut(baked: Bake, machines: Machines, tmp_path: Path) -> None:
    machines[1].ip("link", "set", "wire", "down")
    words = ("doctor", *ON_CPU, "--run.dir", tmp_path / "run", "--distributed.startup_timeout_seconds", "10")
    launchers = start_on_both(machines, baked(launcher="spawn"), *words, logs=tmp_path)
    assert [launcher.wait(timeout=300) for launcher in launchers] == [1, 1]
    for log, reason in (("0.log", "nothing was heard from rank 1"), ("1.log", "nreachable")):
        [(state, told)] = rows_of((tmp_path / log).read_text())["ranks"]
        assert state == "fail" and reason in told, told
