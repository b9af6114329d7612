"""Steps per second of a rendered project, compared with a loop by hand: python tools/benchmarks/steps.py --task digits.

Both train the same model on the same samples with 2 ranks under torchrun, one after the other. The loop by hand is what
a tutorial teaches: ``DistributedSampler``, DDP, fused AdamW, and a log line every 50 steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from cookiecutter.main import cookiecutter

TEMPLATE, BIN = Path(__file__).parents[2], Path(sys.executable).parent
STEPS, EVERY = {"digits": 400, "language": 200}, 50
WORDS = ["--distributed.device", "cpu", "--train.log_every", str(EVERY), "--train.eval_every", "1000000"]
ENVIRONMENT = os.environ | {"NPROC": "2", "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
BY_HAND = """
import itertools, sys, time
import torch, torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from my_experiment.__main__ import parse
from my_experiment.dataset import build_datasets
from my_experiment.model import build_model

_, config, _ = parse(["train"])
dist.init_process_group("gloo")
torch.manual_seed(config.run.seed)
samples, *_ = build_datasets(config)
model = DistributedDataParallel(build_model(config.model))
optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
sampler = DistributedSampler(samples, drop_last=True)
loader = DataLoader(samples, config.data.global_batch_size // dist.get_world_size(), sampler=sampler, drop_last=True)


def batches():
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


clock = time.perf_counter()
for step, (inputs, targets) in enumerate(itertools.islice(batches(), int(sys.argv[1])), start=1):
    loss = cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.clip_grad_norm)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if step % EVERY == 0:
        loss.item()
        if dist.get_rank() == 0:
            print("speed", config.data.global_batch_size * EVERY / (time.perf_counter() - clock), flush=True)
        clock = time.perf_counter()
dist.destroy_process_group()
"""


def by_hand(project: Path, task: str, folder: Path) -> float:
    """Return the samples per second of the loop by hand, after its first log line."""
    script = folder / "by_hand.py"
    script.write_text(BY_HAND.replace("EVERY", str(EVERY)))
    command = [BIN / "torchrun", "--standalone", "--nproc-per-node=2", script, str(STEPS[task])]
    environment = ENVIRONMENT | {"PYTHONPATH": str(project / "src")}
    # After its last line, gloo may abort it: it does not end as a project does.
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=project).stdout
    return statistics.median([float(line.split()[1]) for line in out.splitlines() if line.startswith("speed")][1:])


def by_project(project: Path, task: str, folder: Path) -> tuple[float, float]:
    """Return the samples per second of a run, after its first log line, and the seconds until that line."""
    run, start = folder / f"run{time.monotonic_ns()}", time.time()
    command = [project / "scripts/launch.sh", "train", "--run.dir", run, "--train.max_steps", str(STEPS[task]), *WORDS]
    with subprocess.Popen(command, env=ENVIRONMENT, cwd=project, stdout=subprocess.DEVNULL) as launcher:
        records = run / "metrics.jsonl"
        while not (records.exists() and records.stat().st_size) and launcher.poll() is None:
            time.sleep(0.01)
        first = time.time() - start
    assert launcher.returncode == 0
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    speeds = [line["samples_per_second"] for line in lines if line["event"] == "train"]
    return statistics.median(speeds[1:]), first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=STEPS, default="digits")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--other", type=Path, help="Another rendered project, such as one of an earlier version.")
    options = parser.parse_args()
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        project = Path(
            cookiecutter(str(TEMPLATE), no_input=True, extra_context={"task": options.task}, output_dir=scratch)
        )
        for number in range(options.rounds):
            ours, first = by_project(project, options.task, folder)
            theirs = by_hand(project, options.task, folder)
            line = (
                f"round {number}: {ours:.0f} samples/s, by hand {theirs:.0f}: {ours / theirs:.3f}; record {first:.1f} s"
            )
            if options.other:
                other, first = by_project(options.other, options.task, folder)
                line += f"; other {other:.0f}: {ours / other:.3f}; record {first:.1f} s"
            print(line, flush=True)


if __name__ == "__main__":
    main()
