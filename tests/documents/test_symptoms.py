"""Each line that docs/symptoms.md explains is the one that a project prints."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from conftest import TEMPLATE, Bake, edit, launch, launch_on_full_disk, read_losses, run, started, wait_until
from lines import FORWARD, LOADED, LOSSES, STEM, Changes, after, before

pytestmark = [pytest.mark.weekly, pytest.mark.independent]

ROWS = re.findall(r"^\| `(.+?)` \|", (TEMPLATE / "docs" / "symptoms.md").read_text(), re.MULTILINE)
SMALL = "train --train.max_steps 4 --train.log_every 1 --data.global_batch_size 32 --distributed.device cpu".split()
SMALL += ["--run.dir", "run"]


def on_last_rank(statement: str) -> Changes:
    """Return an edit that executes something on rank 1, before the loss."""
    return before(LOSSES, "import os, time", "if torch.distributed.get_rank() == 1:", f"    {statement}")


def report(project: Path, *words: str, code: int, **environment: Any) -> str:
    """Train, and return what a run reports."""
    return launch(project, *SMALL, *words, code=code, **environment).stderr


def hang(project: Path) -> str:
    edit(project, on_last_rank("time.sleep(1e6)"))
    return report(project, "--distributed.timeout_seconds", "6", code=1, STOP_SECONDS="3")


def call_another_collective(project: Path) -> str:
    edit(project, on_last_rank("torch.distributed.all_reduce(torch.ones(3))"))
    return report(project, "--distributed.timeout_seconds", "20", code=1)


def fail(project: Path) -> str:
    edit(project, on_last_rank('raise ValueError("a bad sample")'))
    return report(project, code=1)


def be_killed(project: Path) -> str:
    edit(project, on_last_rank("os.kill(os.getpid(), 9)"))
    return report(project, code=1)


def debug_in_detail(project: Path) -> str:
    return report(project, code=1, TORCH_DISTRIBUTED_DEBUG="DETAIL")


def have_unused_parameters(project: Path) -> str:
    edit(project, after(STEM, "self.unused = nn.Linear(1, 1)"))
    return report(project, code=2).replace("['stem.unused.weight', 'stem.unused.bias']", "['unused.weight']")


def count_calls(project: Path) -> str:
    counter = "self.register_buffer('calls', self.norm.weight.detach()[0])"
    edit(project, after(STEM, counter) | before(FORWARD, "self.calls += 1"))
    return report(project, code=2)


def explode(project: Path) -> str:
    edit(project, {("task.py", '{"loss": F'): '{"loss": float("nan") * F'})
    return report(project, code=2)


def share_a_folder(project: Path) -> str:
    words = [project / "scripts" / "launch.sh", *SMALL, "--train.epochs", "500", "--train.max_steps", "20000"]
    with started(*words, cwd=project, NPROC="2"):
        wait_until(lambda: read_losses(project / "run"), "the run has started")
        return report(project, code=2)


def be_damaged(project: Path) -> str:
    report(project, "--checkpoint.every_steps", "1", code=0)
    (project / "run" / "checkpoints" / "step-00000004.pt").write_bytes(b"damaged")
    return report(project, code=0)


def fill_the_disk(project: Path) -> str:
    return launch_on_full_disk(project, *SMALL)


def hold_a_lambda(project: Path) -> str:
    edit(project, after(LOADED, "self.crop = lambda image: image"))
    return report(project, "--data.num_workers", "1", code=2)


def hold_a_short_buffer(project: Path) -> str:
    edit(project, after(STEM, "self.register_buffer('short', self.norm.weight.detach().short())"))
    return report(project, code=1)


def link_to_nowhere(project: Path) -> str:
    (project / "run").mkdir()
    (project / "run" / "checkpoints").symlink_to("/nowhere/checkpoints")
    return report(project, code=2)


def find_a_port_in_use(project: Path) -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        return report(project, code=1, NODES="2", NODE_RANK="0", HEAD="127.0.0.1", PORT=port, nproc=1)


def have_an_unreachable_name(project: Path) -> str:
    if os.geteuid() != 0:
        pytest.skip("only root may change a host name")
    words = ("unshare", "--uts", "sh", "-c", 'hostname localhost && exec "$0" "$@"', project / "scripts" / "launch.sh")
    machine = {"NODES": "2", "NODE_RANK": "1", "HEAD": "10.77.0.1", "NPROC": "1"}
    return run(*words, *SMALL, cwd=project, code=2, **machine).stderr


def change_the_batch(project: Path) -> str:
    report(project, "--train.max_steps", "2", code=0)
    return report(project, "--data.global_batch_size", "64", code=2)


def lack_the_environment(project: Path) -> str:
    return report(project, code=2, PYTHON="/usr/bin/python3")


CAUSES = [
    *(
        hang,
        call_another_collective,
        fail,
        be_killed,
        debug_in_detail,
        have_unused_parameters,
        count_calls,
        explode,
        share_a_folder,
        be_damaged,
    ),
    *(fill_the_disk, hold_a_lambda, hold_a_short_buffer, link_to_nowhere, find_a_port_in_use),
    *(have_an_unreachable_name, change_the_batch, lack_the_environment),
]


@pytest.mark.parametrize(("line", "cause"), [*zip(ROWS, CAUSES, strict=True)], ids=[cause.__name__ for cause in CAUSES])
def test_a_symptom_is_printed_as_it_is_explained(bake: Bake, line: str, cause: Any) -> None:
    err = cause(bake())
    assert line in err and err.count("Traceback") <= (cause in (fail, hold_a_short_buffer)), err
