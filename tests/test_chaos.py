"""Faults: a run that is disturbed ends as if nothing had happened, and leaves nothing behind.

`scripts/chaos.sh` kills at random moments, as users do; `tests/chaos.py` has a fault of each kind in each phase.
"""

from __future__ import annotations

import os
import re
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
from chaos import Chain, Outcome, Projects, count_exits, other_faults, table
from conftest import CHOICES, Bake, leave_to_weekly, run
from faults import Fault
from runs import ENDLESS, SHORT, edit, find_marked_processes, losses, records, small, started, wait_for_step, wait_until

pytestmark = pytest.mark.slow

# Long enough that a kill comes before the end on a busy machine, too.
LENGTH = (*SHORT, "--train.max_steps", "150", "--train.epochs", "7")


def chaos(project: Path, kills: int, expect: int = 0) -> str:
    """Run the script with some kills; return what it prints, once it has left no process behind."""
    words = small(project, "train", *LENGTH)[1:]
    mark = str(project)
    done = run(project / "scripts/chaos.sh", *words, cwd=project, NPROC="2", KILLS=str(kills), MARK=mark, expect=expect)
    assert find_marked_processes(mark) == []
    return done.stdout + done.stderr


@pytest.mark.parametrize("launcher", leave_to_weekly(["torchrun", "spawn"], ["spawn"]))
def test_a_run_that_is_killed_at_random_ends_as_one_that_is_left_alone(bake: Bake, launcher: str) -> None:
    output = chaos(bake(launcher=launcher), kills=3)
    times = re.search(
        r"^killed (\d+) times: \d+ records and \d+ tensors are the same, bit for bit$", output, re.MULTILINE
    )
    # The last one may come when the run has just ended.
    assert times is not None and int(times[1]) >= 2, output


def test_a_run_that_forgets_something_is_found_out(bake: Bake) -> None:
    project = bake()
    edit(
        project,
        "checkpoint/checkpointer.py",
        'progress = Progress(**header["progress"])\n',
        'progress = Progress(**header["progress"] | {"samples": 0})\n',
    )
    output = chaos(project, kills=3, expect=1)
    assert re.search(r"^error: after \d kills, \d+ tensor\(s\) or the metrics differ", output, re.MULTILINE), output


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Projects:
    return Projects(tmp_path_factory.mktemp("chaos"))


def assert_undisturbed(outcomes: list[Outcome]) -> None:
    """Assert that each fault came, and that nothing is wrong after it."""
    assert not any(outcome.wrong for outcome in outcomes), "\n".join(
        [table(outcomes), *(text for outcome in outcomes for text in outcome.wrong.values())]
    )


@pytest.mark.parametrize(
    "chain",
    [
        Chain(
            "ddp", "torchrun", [Fault("kill rank", "all-reduce", 1, 2), Fault("kill all", "in the write", 0, 1)], 0.1
        ),
        Chain(
            "ddp", "spawn", [Fault("kill launcher", "before the rename", 0, 2), Fault("kill rank", "start", 0, 1)], 0.1
        ),
        pytest.param(
            Chain("fsdp", "torchrun", [Fault("kill all", "evaluation", 0, 2), Fault("kill rank", "clean-up", 0, 1)]),
            marks=pytest.mark.weekly,
        ),
    ],
    ids=lambda chain: f"{chain.strategy}-{chain.launcher}",
)
def test_a_run_that_is_killed_in_each_phase_resumes_bitwise(projects: Projects, chain: Chain) -> None:
    """The last one also resumes on another number of ranks, and under another strategy."""
    assert_undisturbed(chain.play(projects))


@pytest.mark.weekly
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk")
@pytest.mark.parametrize("launcher", CHOICES["launcher"])
def test_what_does_not_kill_at_once_is_named_and_survived(projects: Projects, launcher: str) -> None:
    assert_undisturbed(other_faults(launcher).play(projects))


def test_torchrun_restarts_a_killed_run_bitwise(projects: Projects) -> None:
    assert_undisturbed(Chain("ddp", "torchrun", [Fault("kill rank", "forward", 1, 5)], 0.1, restarts=1).play(projects))


def test_faults_of_a_project_are_found(tmp_path: Path) -> None:
    """It forgets its random states, prints no cause and leaves a file; and the second fault never comes."""

    def spoil(project: Path) -> None:
        edit(
            project,
            "checkpoint/checkpointer.py",
            '            if name == "rng":\n',
            '            if name == "rng":\n                continue\n',
        )
        edit(project, "launch/ranks.py", "was ended by", "ended by")
        edit(
            project,
            "train.py",
            "        self.checkpointer = ",
            '        __import__("tempfile").mkstemp()\n        self.checkpointer = ',
        )

    chain = Chain("ddp", "torchrun", [Fault("kill rank", "forward", 1, 5), Fault("kill all", "forward", 0, 100)], 0.1)
    first, second = chain.play(Projects(tmp_path, spoil))
    assert (set(first.wrong), set(second.wrong)) == ({"bitwise", "named", "clean"}, {"bitwise", "fired"})


def test_runs_that_do_not_end_well_are_counted(tmp_path: Path) -> None:
    """Those of torchrun leave a file."""

    def spoil(project: Path) -> None:
        if (package := next((project / "src").iterdir())) and (package / "launch/agent.py").exists():
            edit(
                project,
                "train.py",
                "        self.checkpointer = ",
                '        __import__("tempfile").mkstemp()\n        self.checkpointer = ',
            )

    counts, (wrong,) = count_exits(Projects(tmp_path, spoil), launches=2)
    rows = [line.split() for line in counts.splitlines()]
    assert rows[1:3] == [["ddp", "torchrun", "1", "0"], ["ddp", "spawn", "1", "1"]] and rows[-1] == ["all", "2", "1"]
    assert "exit code 0, leaves ['/" in wrong


def test_of_two_jobs_that_start_in_one_run_directory_one_trains(plain: Path, tmp_path: Path) -> None:
    folder, logs = tmp_path / "run", [tmp_path / "0.log", tmp_path / "1.log"]
    command = [plain / "scripts/launch.sh", "train", *SHORT, *ENDLESS, "--run.dir", folder]
    with ExitStack() as stack:
        jobs = [stack.enter_context(started(*command, cwd=plain, log=log, NPROC="2")) for log in logs]
        wait_until(lambda: any(job.poll() is not None for job in jobs), "one is rejected", 120)
        rejected = next(number for number, job in enumerate(jobs) if job.poll() is not None)
        wait_for_step(3, folder, jobs[1 - rejected], logs[1 - rejected])
        jobs[1 - rejected].send_signal(signal.SIGTERM)
        assert [jobs[rejected].wait(), jobs[1 - rejected].wait(120)] == [2, 128 + signal.SIGTERM]
    assert re.fullmatch(rf"error: {folder} is in use by another run; .*\n", logs[rejected].read_text())
    assert [record["step"] for record in records(folder, "train")] == list(range(1, len(losses(folder)) + 1))
