"""Repeated stop signals: Slurm may signal all processes of a job, and launchers forward the signal as well."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from conftest import run

pytestmark = pytest.mark.slow

STOP = """
import os, signal
from my_experiment.config import DistributedConfig
from my_experiment.runtime import StopSignal, process_group
with process_group(DistributedConfig(), devices_per_rank=1), StopSignal(0.15) as stop:
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGUSR1)
    print(signal.Signals(stop.received).name, flush=True)
    stop.received_at -= 60
    os.kill(os.getpid(), signal.SIGUSR1)
"""


def test_only_a_later_stop_signal_ends_a_rank_at_once(plain: Path) -> None:
    done = run(sys.executable, "-c", STOP, cwd=plain, PYTHONPATH="src", expect=-signal.SIGUSR1)
    assert done.stdout == "SIGUSR1\n"


LOAD = """
import os, signal
import torch
from my_experiment.config import Config
from my_experiment.data import EvalSampler, build_loader, seed_dataset
from my_experiment.dataset import build_datasets
config = Config()
config.data.num_workers = 1
dataset = seed_dataset(build_datasets(config)[1], seed=0)
loader = build_loader(dataset, EvalSampler(len(dataset), 0, 1, 10), 10, config.data, torch.device("cpu"))
batches = iter(loader)
next(batches)
for worker in loader.processes.loader._iterator._workers:
    os.kill(worker.pid, signal.SIGUSR1)
print(1 + len(list(batches)))
"""


def test_a_loader_process_ignores_stop_signals(plain: Path) -> None:
    assert run(sys.executable, "-c", LOAD, cwd=plain, PYTHONPATH="src").stdout == "36\n"
