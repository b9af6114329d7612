"""Tokens per second, MFU, memory, and seconds per save of a GPT of 124 million parameters, beside three plain loops.

`make test-gpu` runs it on one accelerator; DEVICE=cpu tries it on a CPU, with a small model; --saves times saves alone.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from conftest import launch, read_records, render, run

DEVICE = os.environ.get("DEVICE", "auto")
os.environ |= {"PYTHON": sys.executable, "PYTHONPATH": ""}  # For the launchers.
STEPS, EVERY = 40, 10
ON_CPU, SAVES_ONLY = DEVICE == "cpu", "--saves" in sys.argv
# Activations of a plain loop take about a GiB per window, in bf16.
BATCH = 4 if ON_CPU else min(32, 2 ** int(np.log2(torch.cuda.get_device_properties(0).total_memory / 2**30 / 1.2)))
WIDTH, LAYERS, CONTEXT = (64, 2, 64) if ON_CPU and not SAVES_ONLY else (768, 12, 64 if ON_CPU else 1024)
WORDS = [
    *f"--model.width {WIDTH} --model.layers {LAYERS} --model.heads {WIDTH // 64} --model.context {CONTEXT}".split(),
    *f"--data.global_batch_size {BATCH} --data.eval_batch_size {BATCH} --train.precision bf16 --optim.lr 6e-4".split(),
    *f"--dataset.test_bytes {4 * BATCH * CONTEXT} --train.epochs 99 --distributed.device {DEVICE}".split(),
]
PLAIN = """
import sys, time
import numpy as np, torch
from torch.nn.functional import cross_entropy
from my_experiment.__main__ import parse
from my_experiment.dataset import build_datasets
from my_experiment.model import build_model

how, steps, every = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
_, config, _ = parse(["train", *sys.argv[4:]])
device = torch.device("cpu" if config.distributed.device == "cpu" else "cuda")
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
samples, *_ = build_datasets(config)
torch.manual_seed(0)
model = build_model(config.model).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, fused=True)


def compute_loss(inputs, targets):
    with torch.autocast(device.type, torch.bfloat16):
        return cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


if how == "blocks":
    for block in model:
        block.compile()
if how == "whole":
    compute_loss = torch.compile(compute_loss)
clock, size = time.perf_counter(), config.data.global_batch_size
for step in range(1, steps + 1):
    batch = [samples[index] for index in np.random.randint(len(samples), size=size)]
    inputs, targets = (torch.stack(list(part)) for part in zip(*batch))
    if device.type == "cuda":
        inputs, targets = (part.pin_memory().to(device, non_blocking=True) for part in (inputs, targets))
    loss = compute_loss(inputs, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % every == 0:
        loss.item()
        print("speed", size * config.model.context * every / (time.perf_counter() - clock))
        clock = time.perf_counter()
print("memory", torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0)
"""
SAVES = """
import sys, time
from my_experiment.__main__ import parse
from my_experiment.distributed import cleanup, rendezvous, setup
from my_experiment.train import Trainer

_, config, _ = parse(sys.argv[1:])
process = rendezvous(config)
setup(config, process)
trainer = Trainer(config, process)
save = trainer.checkpointer.save


def timed(progress):
    if process.device.type != "cpu":
        import torch
        torch.accelerator.synchronize()
    start = time.perf_counter()
    path = save(progress)
    print("blocked", time.perf_counter() - start)
    return path


trainer.checkpointer.save = timed
trainer.run()
cleanup(process)
"""


def plain(project: Path, how: str) -> tuple[float, float]:
    """Return tokens per second, and the peak of memory in GiB, of a plain loop."""
    words = [sys.executable, "-c", PLAIN, how, str(STEPS), str(EVERY), *WORDS]
    lines = [line.split() for line in run(*words, cwd=project, PYTHONPATH="src").stdout.splitlines()]
    speeds = [float(value) for name, value in lines if name == "speed"]
    return statistics.median(speeds[2:]), float(lines[-1][1])


def by_project(project: Path, folder: Path, words: list[str]) -> tuple[float, float, float]:
    """Return tokens per second, the peak of memory in GiB, and MFU, of a run of one rank."""
    often = ["--train.max_steps", str(STEPS), "--train.log_every", str(EVERY), "--train.eval_every", "1000000"]
    launch(project, "train", *WORDS, *often, *words, "--run.dir", folder, nproc=1)
    records = read_records(folder, "train")[2:]
    names = ("tokens_per_second", "peak_memory_gib", "mfu")
    speed, memory, mfu = (statistics.median(record.get(name, 0.0) for record in records) for name in names)
    return speed, memory, mfu


def save_seconds(project: Path, folder: Path, words: list[str]) -> list[float]:
    """Return for how long saves stop training; from the second on, the one before may still be being written."""
    often = ["--train.max_steps", "12", "--checkpoint.every_steps", "3", "--run.dir", str(folder)]
    out = run(sys.executable, "-c", SAVES, "train", *WORDS, *often, *words, cwd=project, PYTHONPATH="src").stdout
    return [float(line.split()[1]) for line in out.splitlines() if line.startswith("blocked")]


def print_speeds(ddp: Path, fsdp: Path, folder: Path) -> None:
    """Print tokens per second, MFU and memory of the plain loops and of runs."""
    loops = {f"plain loop, {how}": plain(ddp, how) for how in ("eager", "blocks", "whole")}
    fast, compiled = ["--train.exact", "false"], ["--train.exact", "false", "--train.compile", "true"]
    runs = {
        "ddp": by_project(ddp, folder / "exact", []),
        "ddp, exact=false": by_project(ddp, folder / "fast", fast),
        "ddp, exact=false, compiled": by_project(ddp, folder / "compiled", compiled),
        "fsdp, exact=false, compiled": by_project(fsdp, folder / "sharded", compiled),
    }
    per_token = runs["ddp"][2] / runs["ddp"][0]  # MFU; 0 on devices whose peak task.py does not know.
    print(f"batch of {BATCH} windows of {CONTEXT} tokens, bf16\n")
    print("| | tokens/s | MFU | peak GiB |\n| --- | --- | --- | --- |")
    for name, (speed, memory, *_) in (loops | runs).items():
        print(f"| {name} | {speed:,.0f} | {speed * per_token:.3f} | {memory:.1f} |")


def main() -> None:
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tokens, vocabulary = folder / "tokens.bin", 50_304
        np.random.default_rng(0).integers(0, vocabulary, 80 * BATCH * CONTEXT).astype(np.uint16).tofile(tokens)
        about = {"dtype": "uint16", "vocabulary": vocabulary, "end": -1, "bytes_per_token": 4.0, "tokenizer": None}
        tokens.with_suffix(".json").write_text(json.dumps(about))
        WORDS.extend(["--dataset.path", str(tokens)])
        ddp, fsdp = (render(folder / name, hooks=False, parallelism=name, task="language") for name in ("ddp", "fsdp"))
        if not SAVES_ONLY:
            print_speeds(ddp, fsdp, folder)
        saves = {
            "ddp": save_seconds(ddp, folder / "save", []),
            "fsdp": save_seconds(fsdp, folder / "full", []),
            "fsdp, sharded": save_seconds(fsdp, folder / "shards", ["--checkpoint.format", "sharded"]),
        }
    print("\n| saves | seconds for which each stops training |\n| --- | --- |")
    for name, seconds in saves.items():
        print(f"| {name} | {', '.join(f'{value:.2f}' for value in seconds)} |")


if __name__ == "__main__":
    main()
