"""`scripts/chaos.sh` kills a run at random moments, and sees whether it ends as if nothing had happened."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import Bake, run
from runs import SHORT, edit, find_marked_processes, small

pytestmark = pytest.mark.slow

LENGTH = (*SHORT, "--train.max_steps", "60", "--train.epochs", "3")


def chaos(project: Path, kills: int, expect: int = 0) -> str:
    """Run the script with some kills; return what it prints, once it has left no process behind."""
    words = small(project, "train", *LENGTH)[1:]
    mark = str(project)
    done = run(project / "scripts/chaos.sh", *words, cwd=project, NPROC="2", KILLS=str(kills), MARK=mark, expect=expect)
    assert find_marked_processes(mark) == []
    return done.stdout + done.stderr


@pytest.mark.parametrize("launcher", ["torchrun", "spawn"])
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
        '        return Progress(**header["progress"])\n',
        '        return Progress(**header["progress"] | {"samples": 0})\n',
    )
    output = chaos(project, kills=3, expect=1)
    assert re.search(r"^error: after \d kills, \d+ tensor\(s\) or the metrics differ", output, re.MULTILINE), output
