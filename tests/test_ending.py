"""How one process of a run ends: its exit code and what it prints, and that none of gloo's threads aborts it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import CHOICES, Bake, run
from runs import plant

MAIN = """
import atexit, sys, threading, time
from my_experiment.launch import run_and_exit

def say_later():
    time.sleep(0.3)
    print("thread")

def main(*words):
    atexit.register(print, "registered")
    threading.Thread(target=say_later).start()
    print(*words)
    {line}

run_and_exit(main, "begun", "to end")
print("never printed")
"""
# PyTorch finalizes MPI in a handler of the C library, as is registered here.
MPI = """
import ctypes, torch.distributed
from my_experiment.launch import run_and_exit

torch.distributed.is_mpi_available = lambda: {}
library = ctypes.CDLL(None)
run_and_exit(library.__cxa_atexit, library.puts, b"finalized", None)
"""
# Gloo's threads have half a second of work left, each with a Python function, which has to be dropped afterwards.
UNFINISHED = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
rows = torch.ones(5_000_000)
for _ in range(50):
    dist.all_gather([torch.empty_like(rows)], rows, async_op=True).get_future().then(lambda _: None)
return
"""


def run_code(project: Path, code: str, expect: int = 0) -> tuple[str, str]:
    """Return what the code prints into pipes, which Python buffers."""
    ended = run(sys.executable, "-c", code, cwd=project / "src", expect=expect, PYTHONUNBUFFERED="")
    return ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("return 5", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(143)", 143, ""),
        ("sys.exit('no such file')", 1, "no such file\n"),
        ("raise ValueError('no such row')", 1, "ValueError: no such row\n"),
    ],
)
def test_a_process_ends_as_with_python(baked: Bake, line: str, code: int, said: str) -> None:
    printed, reported = run_code(baked(), MAIN.format(line=line), expect=code)
    assert printed == "begun to end\nthread\nregistered\n"
    assert reported.endswith(said) and bool(reported) == bool(said)


def test_output_that_cannot_be_written_is_an_error(baked: Bake) -> None:
    _, reported = run_code(baked(), MAIN.format(line="sys.stdout = open('/dev/full', 'w')"), expect=1)
    assert "No space left on device" in reported


@pytest.mark.parametrize(("available", "printed"), [(False, ""), (True, "finalized\n")])
def test_mpi_is_finalized(baked: Bake, available: bool, printed: str) -> None:
    assert run_code(baked(), MPI.format(available)) == (printed, "")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", CHOICES["launcher"])
def test_a_thread_of_gloo_does_not_abort_a_process(bake: Bake, launcher: str) -> None:
    project = bake(launcher=launcher)
    plant(project, "__main__.py", "    gc.disable()\n", UNFINISHED.strip())
    for _ in range(2):
        run("scripts/launch.sh", "train", cwd=project, NPROC="1")
