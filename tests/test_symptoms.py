"""Troubleshooting: every symptom that the README quotes is reproduced, and users see exactly this text."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, Bake, run
from runs import (
    ENDLESS,
    SHORT,
    alone,
    find_marked_processes,
    free_port,
    launch,
    losses,
    plant,
    records,
    started,
    taken_port,
    wait_for_step,
    wait_until,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's table of processes in /proc"),
]

SHORT_TIMEOUT = ("--distributed.timeout_seconds", "5", "--data.global_batch_size", "48")
REPRODUCED: set[str] = set()


def reproduces(text: str) -> pytest.MarkDecorator:
    """Return a mark for the test that reproduces a text quoted in the README, which it gets as ``symptom``."""
    REPRODUCED.add(text)
    return pytest.mark.parametrize("symptom", [text])


def quoted_symptoms(project: Path) -> set[str]:
    """Return all texts that the first column of the README's troubleshooting table quotes."""
    table = (project / "README.md").read_text().split("## Troubleshooting\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
    assert rows and all(len(row) == 3 for row in rows), rows
    return {text for symptom, _, _ in rows for text in re.findall("`(.+?)`", symptom)}


def launch_failing_run(project: Path, *arguments: str | Path, nproc: int = 2, **environment: str) -> str:
    """Launch a run that must fail, check that it leaves no process behind, and return its output."""
    mark, command = str(project), (project / "scripts/launch.sh", *arguments)
    with started(*command, cwd=project, NPROC=str(nproc), MARK=mark, **environment) as launcher:
        stdout, stderr = launcher.communicate(timeout=300)
        assert launcher.returncode not in (0, 124), stdout
        assert find_marked_processes(mark) == []
    return stdout + stderr


def train_with_fault(project: Path, fault: str, nproc: int) -> str:
    """Train with a fault in step 4 of rank 1, check that one other rank reports it, and return the output."""
    planted = f"if progress.step == 3 and self.process.rank == 1:\n    {fault}"
    plant(project, "train.py", "        losses, norm = self.step(inputs, targets)\n", planted)
    output = launch_failing_run(
        project, "train", *SHORT, *SHORT_TIMEOUT, "--run.dir", project / "run", nproc=nproc, STOP_SECONDS="8"
    )
    assert len(records(project / "run", "train")) == 3
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and lines[0].startswith("error: after step 3, "), output
    assert "See 'Troubleshooting' in README.md" in lines[0]
    return output


SILENT_FAULTS = {  # The code of faults after which a rank reports nothing, and what each launcher prints.
    "hangs": ("__import__('time').sleep(1000)", {"torchrun": "SIGKILL", "spawn": ""}),
    "killed": ("__import__('os').kill(__import__('os').getpid(), 9)", {"torchrun": "SIGKILL", "spawn": "SIGKILL"}),
}


@reproduces("no report from rank")
@pytest.mark.parametrize(
    ("fault", "parallelism", "launcher", "nproc"),
    [
        ("hangs", "ddp", "torchrun", 3),
        ("hangs", "pipeline", "spawn", 2),
        ("killed", "fsdp", "torchrun", 2),
        ("killed", "tensor", "spawn", 2),
    ],
)
def test_the_error_names_a_rank_that_hangs_or_is_killed(
    bake: Bake, symptom: str, fault: str, parallelism: str, launcher: str, nproc: int
) -> None:
    project = bake(parallelism=parallelism, launcher=launcher)
    code, launcher_output = SILENT_FAULTS[fault]
    output = train_with_fault(project, code, nproc)
    assert symptom in quoted_symptoms(project)
    assert re.search(rf"{symptom} 1: .*; rank 0 waited at [\w/]+\.py:\d+, \w+", output), output
    assert launcher_output[launcher] in output


@pytest.mark.parametrize(
    ("file", "line", "function"),
    [
        ("evaluate.py", "        self.metrics = merge(", "__call__"),
        ("checkpoint/checkpointer.py", "        full = gather_full_tensors(", "gather_full_tensors"),
    ],
)
def test_the_error_names_the_line_where_a_rank_waited(bake: Bake, file: str, line: str, function: str) -> None:
    """The line that called a collective, not the shared helper that issues it."""
    project = bake(launcher="spawn")
    source = next((project / "src").iterdir()) / file
    (found,) = [each + "\n" for each in source.read_text().splitlines() if each.startswith(line)]
    fault = (
        "if __import__('torch').distributed.get_rank() == 1:\n    __import__('os').kill(__import__('os').getpid(), 9)"
    )
    plant(project, file, found, fault)
    output = launch_failing_run(
        project, "train", *SHORT, *SHORT_TIMEOUT, "--run.dir", project / "run", STOP_SECONDS="8"
    )
    expected = file if function == "__call__" else "checkpoint/state_dict.py"
    assert re.search(rf"no report from rank 1: .*; rank 0 waited at {expected}:\d+, {function}\.", output), output


@reproduces("failed at")
@pytest.mark.parametrize("launcher", ["torchrun", "spawn"])
def test_the_error_of_a_waiting_rank_names_the_failed_rank(bake: Bake, symptom: str, launcher: str) -> None:
    project = bake(parallelism="model_parallel", launcher=launcher)
    output = train_with_fault(project, "raise ZeroDivisionError('planted')", nproc=2)
    assert symptom in quoted_symptoms(project)
    assert re.search(rf"rank 1 {symptom} train\.py:\d+, run_step: ZeroDivisionError: planted", output), output
    assert "Traceback" in output


@reproduces("does not have a deterministic implementation")
def test_an_operation_that_differs_from_time_to_time_is_an_error(bake: Bake, symptom: str) -> None:
    """Here one of the few that have no deterministic algorithm on a CPU."""
    project, words = bake(), ("train", *SHORT, "--run.dir", "run")
    plant(project, "train.py", "        device, clip = ", "torch.zeros(3).put_(torch.tensor([1]), torch.ones(1))")
    output = launch_failing_run(project, *words)
    assert symptom in quoted_symptoms(project) and symptom in output
    launch(project, *words, "--train.exact", "false")
    assert len(losses(project / "run")) == 6


@reproduces("Is there a distributed collective mismatch in your code?")
def test_ranks_in_different_collectives_report_the_mismatch(bake: Bake, symptom: str) -> None:
    project = bake()
    output = train_with_fault(project, "torch.distributed.all_reduce(torch.ones(1))", nproc=2)
    assert symptom in quoted_symptoms(project) and symptom in output
    assert "rank 0 waited at parallel.py" in output or "rank 1 waited at train.py" in output


NO_MEMORY = """
import threading
def start(_):
    raise RuntimeError("can't start new thread")
threading.Thread.start = start
raise MemoryError("no room")
"""


def test_a_rank_without_memory_for_a_thread_reports(bake: Bake) -> None:
    assert "rank 1 failed at train.py" in train_with_fault(bake(), f"exec({NO_MEMORY!r})", nproc=2)


EXPLAIN = """
import os
from pathlib import Path
from my_experiment.runtime.failures import Report, explain, record_collectives
one, same, other = (Report(True, f"train.py:{line}, log", "timed out") for line in (1, 1, 2))
print(explain({0: one, 1: same}, 2, "after step 3", False))
print(explain({0: one, 1: other}, 2, "after step 3", False))
record_collectives(Path("runs/default"))
print(os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"], os.environ["TORCH_FR_DUMP_TEMP_FILE"])
"""


def test_only_ranks_that_waited_at_different_lines_are_said_to_be_in_different_collectives(plain: Path) -> None:
    """What NCCL's watchdog writes has the name that the README's command reads."""
    done = run(sys.executable, "-c", EXPLAIN, cwd=plain, PYTHONPATH="src").stdout.splitlines()
    assert done == [
        "after step 3, all ranks waited at train.py:1, log: a message took longer than distributed.timeout_seconds "
        "(startup_timeout_seconds before the second step), or the connection between them broke",
        "after step 3, the ranks waited for each other in different collectives: rank 0 waited at train.py:1, log; "
        "rank 1 waited at train.py:2, log",
        "1 runs/default/collectives_",
    ]
    assert "fr_trace runs/default --prefix collectives_`" in (plain / "README.md").read_text()


# Arguments of plant(): a layer that the forward pass does not use.
UNUSED_LAYER = "        self.linear = nn.Linear(width, CLASSES)\n", "self.spare = nn.GroupNorm(1, 1)"


@reproduces("the loss does not depend on")
@pytest.mark.parametrize("parallelism", ["ddp", "model_parallel"])
def test_the_error_names_parameters_without_a_gradient(bake: Bake, symptom: str, parallelism: str) -> None:
    project = bake(parallelism=parallelism, launcher="spawn")
    plant(project, "model.py", *UNUSED_LAYER)
    output = launch_failing_run(project, "train", *SHORT, "--run.dir", project / "run")
    assert symptom in quoted_symptoms(project)
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and f"{symptom} head.spare.weight, head.spare.bias:" in lines[0], output
    assert "--parallel.find_unused_parameters true" in lines[0] and "Traceback" not in output


@reproduces("Expected to have finished reduction in the prior iteration")
def test_a_parameter_without_a_gradient_in_later_steps_needs_find_unused_parameters(bake: Bake, symptom: str) -> None:
    project = bake()
    plant(project, "model.py", *UNUSED_LAYER)
    plant(
        project,
        "model.py",
        "        return self.linear(features.mean(dim=(2, 3)))\n",
        "self.calls = getattr(self, 'calls', 0) + 1\n"
        "if self.calls < 3:\n    features = features + self.spare.weight + self.spare.bias",
    )
    assert symptom in quoted_symptoms(project)
    arguments = ("train", *SHORT, "--run.dir", project / "run")
    assert symptom in alone(project, *arguments, expect=1).stderr
    alone(project, *arguments, "--parallel.find_unused_parameters", "true")


@pytest.fixture(scope="module")
def expected_losses(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a short run in one process, with an unchanged model."""
    folder = tmp_path_factory.mktemp("expected")
    alone(plain, "train", *SHORT, "--run.dir", folder)
    return losses(folder)


@pytest.mark.parametrize(
    ("parallelism", "arguments"),
    [("ddp", "--parallel.find_unused_parameters true"), ("fsdp", "--checkpoint.format sharded"), ("tensor", "")],
)
def test_parameters_without_a_gradient_do_not_change_the_losses(
    bake: Bake, expected_losses: list[float], parallelism: str, arguments: str, tmp_path: Path
) -> None:
    project = bake(parallelism=parallelism)
    plant(project, "model.py", *UNUSED_LAYER)
    for steps in ("3", "6"):  # The second run resumes from the checkpoint of the first.
        launch(project, "train", *SHORT, *arguments.split(), "--train.max_steps", steps, "--run.dir", tmp_path)
    assert len(expected_losses) == 6 and losses(tmp_path) == pytest.approx(expected_losses, rel=1e-5)


@pytest.fixture
def busy_port() -> Iterator[int]:
    """A port that another program uses."""
    with taken_port() as port:
        yield port


@reproduces("port in use on this machine")
@pytest.mark.parametrize("launcher", ["torchrun", "spawn"])
def test_a_port_in_use_is_reported_in_one_line(
    baked: Bake, symptom: str, launcher: str, busy_port: int, tmp_path: Path
) -> None:
    project = baked(launcher=launcher)
    arguments, rendezvous = ("train", *SHORT, "--run.dir", tmp_path / "run"), f"tcp://127.0.0.1:{busy_port}"
    nodes = {"NODES": "2", "NODE_RANK": "0", "HEAD": "127.0.0.1", "PORT": str(busy_port)}
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(busy_port)}
    results = {
        "--distributed.init_method": launch(project, *arguments, "--distributed.init_method", rendezvous, expect=2),
        "PORT": run(project / "scripts/multinode.sh", *arguments, cwd=project, expect=2, **nodes),
        "MASTER_PORT": alone(project, *arguments, expect=2, **environment),
    }
    assert symptom in quoted_symptoms(project)
    for setting, result in results.items():
        assert result.stderr.startswith(f"error: {symptom}: ") and result.stderr.count("\n") == 1, result.stderr
        assert str(busy_port) in result.stderr and setting in result.stderr
    assert not (tmp_path / "run").exists()


SHORT_STARTUP_TIMEOUT = ("--distributed.startup_timeout_seconds", "5")


@reproduces("did not reach the other")
def test_a_rank_that_never_starts_is_reported(baked: Bake, symptom: str, tmp_path: Path) -> None:
    arguments = ("train", *SHORT, *SHORT_STARTUP_TIMEOUT, "--run.dir", tmp_path / "run")
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    result = alone(baked(), *arguments, expect=2, **environment)
    assert symptom in quoted_symptoms(baked())
    assert result.stderr.startswith("error: rank 0 ") and symptom in result.stderr and result.stderr.count("\n") == 1


@reproduces("clients joined")
@pytest.mark.parametrize("launcher", ["torchrun", "spawn"])
def test_a_machine_that_never_starts_is_reported(baked: Bake, symptom: str, launcher: str, tmp_path: Path) -> None:
    project = baked(launcher=launcher)
    arguments = ("train", *SHORT, *SHORT_STARTUP_TIMEOUT, "--run.dir", tmp_path / "run")
    nodes = {"NODES": "2", "NODE_RANK": "0", "HEAD": "127.0.0.1", "PORT": str(free_port()), "NPROC": "1"}
    torchrun = launcher == "torchrun"  # torchrun itself waits for the other machines.
    result = run(project / "scripts/multinode.sh", *arguments, cwd=project, expect=1 if torchrun else 2, **nodes)
    last_line = result.stderr.splitlines()[-1]
    assert (symptom in quoted_symptoms(project)) == torchrun
    assert (symptom if torchrun else "did not reach the other") in last_line, result.stderr
    assert not (tmp_path / "run").exists()


@reproduces("out of memory after step")
@pytest.mark.parametrize("nproc", [1, 2])
def test_an_out_of_memory_error_names_the_largest_tensors(
    baked: Bake, symptom: str, tmp_path: Path, nproc: int
) -> None:
    """The step that runs out of memory is the first one; a limit for address space makes it fail."""
    project = baked()
    assert symptom in quoted_symptoms(project)
    arguments = ("--model.width", "512", "--data.global_batch_size", str(512 * nproc), "--run.dir", tmp_path / "run")
    limited = ("bash", "-c", 'ulimit -v 2500000; exec "$@"', "limited", project / "scripts/launch.sh")
    result = run(*limited, "train", *SHORT, *arguments, cwd=project, NPROC=str(nproc), expect=1)
    line = next((line for line in result.stderr.splitlines() if f"{symptom} 0: tried to allocate" in line), "")
    assert "lower data.global_batch_size" in line, result.stderr
    assert re.search(r"rank \d holds [1-9]\d* MiB in tensors \(\d+ x float32 \[512, \d+", line), line


@reproduces("unable to allocate shared memory")
@pytest.mark.parametrize("docker", [False, True])
def test_too_little_shared_memory_is_reported(baked: Bake, symptom: str, docker: bool, tmp_path: Path) -> None:
    mounted = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a separate /dev/shm for this test: {mounted.stderr.decode().strip()}")
    project = baked(docker=docker)
    assert symptom in quoted_symptoms(project)
    with_small_shm = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"', "small")
    arguments = ("-m", "my_experiment", "train", *SHORT, "--run.dir", tmp_path, "--data.num_workers", "1")
    result = run(*with_small_shm, sys.executable, *arguments, cwd=project, PYTHONPATH="src", expect=1)
    assert symptom in result.stderr


@reproduces("is in use by another run")
@pytest.mark.parametrize("launcher", ["torchrun", "spawn"])
def test_pgrep_lists_a_run_until_its_launcher_is_killed(bake: Bake, symptom: str, launcher: str) -> None:
    """While the run is listed, another run cannot use its directory."""
    project = bake(launcher=launcher)
    pgrep = next(iter(re.findall(r"`(pgrep [^`]+)`", (project / "README.md").read_text())))
    (project / ".venv").symlink_to(ENVIRONMENT)
    arguments = ("train", *SHORT, *ENDLESS, "--data.num_workers", "1", "--run.dir", "run")
    folder, log = project / "run", project / "log"

    def list_pids() -> list[int]:
        """Return the ids of this project's processes that the README's command lists."""
        lines = subprocess.run(pgrep.split(), capture_output=True, text=True).stdout.splitlines()
        return [int(line.split()[0]) for line in lines if str(project) in line]

    # Without PYTHON, the launcher takes the project's environment, whose path is on each command line.
    with started(project / "scripts/launch.sh", *arguments, cwd=project, log=log, NPROC="2", PYTHON="") as launcher:
        wait_for_step(1, folder, launcher, log)
        # The launcher, two ranks, and a loader process per rank.
        assert launcher.pid in list_pids() and len(list_pids()) >= 5
        second = run(
            *(project / ".venv/bin/python", "-m", "my_experiment", *arguments), cwd=project, PYTHONPATH="src", expect=2
        )
        assert second.stderr.count("\n") == 1, second.stderr
        assert symptom in second.stderr and symptom in quoted_symptoms(project)
        launcher.kill()
        wait_until(lambda: list_pids() == [], "no process is left", 120)


def test_every_quoted_symptom_is_reproduced(baked: Bake) -> None:
    projects = [
        baked(**answers)
        for answers in (
            {},
            {"launcher": "spawn", "docker": True},
            {"parallelism": "model_parallel"},
            {"parallelism": "pipeline"},
            {"parallelism": "data_parallel"},
        )
    ]
    assert set().union(*(quoted_symptoms(project) for project in projects)) == REPRODUCED
