"""Two machines train as one process does, stop together, and resume after a signal, a cut link or a killed rank."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Bake, find_processes, launch, read_losses, run, started, wait_until, weekly
from machines import Machines, needs_root, two_machines
from training import SHORT, STEPS, TRAIN, check_first_losses

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    """Two connected machines."""
    with two_machines() as created:
        yield created


@pytest.fixture(scope="module")
def whole(baked: Bake, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    launch(baked(), *TRAIN, "--run.dir", folder)
    return folder


@needs_root
@pytest.mark.parametrize(
    ("launcher", "head"), [("torchrun", "fd77::1"), *weekly(("spawn", "10.77.0.1"), ("spawn", "fd77::1"))]
)
def test_two_machines_have_the_losses_of_one_process(
    baked: Bake, machines: Machines, tmp_path: Path, launcher: str, head: str
) -> None:
    project = baked(launcher=launcher)
    with machines.start(project, *SHORT, "--run.dir", tmp_path / "run", HEAD=head) as launchers:
        assert "on 2 rank(s)" in machines.wait(launchers, code=0)[0]
    check_first_losses(project, tmp_path / "run", tmp_path / "alone")


@needs_root
@pytest.mark.parametrize("script", ["launch.sh", "rank.sh"])
def test_a_host_name_that_other_machines_do_not_reach_is_refused(baked: Bake, tmp_path: Path, script: str) -> None:
    named = ("unshare", "--uts", "sh", "-c", 'hostname localhost && exec "$0" "$@"')
    machine = {"NODES": "2", "NODE_RANK": "1", "NPROC": "1", "HEAD": "fd77::1"}
    machine |= {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}
    project = baked(cluster="slurm")
    words = (*named, project / "scripts" / script, *SHORT, "--run.dir", tmp_path / "run")
    err = run(*words, cwd=project, code=2, **machine).stderr
    assert err.count("\n") == 1 and "localhost; set GLOO_SOCKET_IFNAME" in err, err


def resume(machines: Machines, project: Path, words: list[str], whole: Path, folder: Path) -> int:
    """Resume a run to its end, check its losses, and return the step that it resumed from."""
    with machines.start(project, *words, "--run.dir", folder) as launchers:
        output = machines.wait(launchers, code=0)[0]
    assert read_losses(folder) == read_losses(whole)
    found = re.search(rf"step (\d+) of {STEPS} on 2 rank", output)
    assert found is not None, output
    return int(found[1])


@needs_root
def test_a_signal_to_one_launcher_stops_both_machines(
    baked: Bake, machines: Machines, whole: Path, tmp_path: Path
) -> None:
    with machines.start(baked(), *TRAIN, "--run.dir", tmp_path) as launchers:
        wait_until(lambda: len(read_losses(tmp_path)) > 10, "the run has started", 240)
        launchers[1].terminate()
        machines.wait(launchers, code=143)
    stopped = len(read_losses(tmp_path))
    assert 10 < stopped < STEPS and resume(machines, baked(), TRAIN, whole, tmp_path) == stopped


@needs_root
def test_a_cut_link_ends_both_machines(baked: Bake, machines: Machines, whole: Path, tmp_path: Path) -> None:
    words = [*TRAIN, "--distributed.timeout_seconds", "5"]
    with machines.start(baked(), *words, "--run.dir", tmp_path) as launchers:
        wait_until(lambda: len(read_losses(tmp_path)) > 11, "the run has started", 240)
        machines.ip(0, "link set wire down")
        for output in machines.wait(launchers, code=1):
            assert re.search(r"error: rank [01] waited in vain: (rank [01] failed|no report from rank)", output), output
    machines.ip(0, "link set wire up")
    assert 10 <= resume(machines, baked(), words, whole, tmp_path) < STEPS


def test_torchrun_restarts_the_ranks_when_one_is_killed(baked: Bake, whole: Path, tmp_path: Path) -> None:
    words = (baked() / "scripts" / "launch.sh", *TRAIN, "--run.dir", tmp_path)
    with started(*words, cwd=baked(), NPROC="2", MAX_RESTARTS="1", MARK=str(tmp_path)) as launcher:
        wait_until(lambda: len(read_losses(tmp_path)) > 11, "the run has started", 240)
        (rank,) = {*find_processes("LOCAL_RANK=1")} & {*find_processes(f"MARK={tmp_path}")}
        os.kill(rank, signal.SIGKILL)
        output = "".join(launcher.communicate(timeout=200))
        assert launcher.returncode == 0, output
    steps = [int(step) for step in re.findall(rf"step (\d+) of {STEPS} on 2 rank", output)]
    assert steps[0] == 0 and steps[1] >= 10 and read_losses(tmp_path) == read_losses(whole)
