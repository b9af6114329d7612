"""What the tests share: starting the shipped launcher, and reading what a run left."""

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
PACKAGE = "{{ cookiecutter.__package }}"
#:: include "task/" ~ cookiecutter.task ~ "/tests.py" ::#
# The runs that several tests share: they end in their second epoch, and each setting has an effect on them.
STEPS = 20
SEED = ("--run.seed", "7")
LENGTH = [
    *f"--train.max_steps {STEPS} --train.log_every 1 --train.eval_every 10 --checkpoint.every_steps 4".split(),
    *"--optim.lr 1e-3 --optim.warmup_steps 5 --optim.decay_steps 30 --optim.min_lr_ratio 0.1".split(),
    *("--optim.weight_decay", "0.1", "--optim.betas", "[0.8, 0.95]", "--optim.eps", "1e-6"),
    *("--train.clip_grad_norm", "0.1", "--data.eval_batch_size", "17", "--distributed.agree_seconds", "0", *SEED),
]
# How much a split may change the result, relative to it: what different rounding does, and some more.
TOLERANCE = 1e-5
SHARDED = ("--checkpoint.format", "sharded")
#:: include "parallelism/" ~ cookiecutter.parallelism ~ "/tests.py" ::#


def module(name: str) -> Any:
    """Import a module of the package."""
    return import_module(f"{PACKAGE}.{name}")


def split_id(value: int | list[str]) -> str:
    """Return the name of a test's parameter: a number of ranks, or settings."""
    return f"{value} rank(s)" if isinstance(value, int) else " ".join(value)


def environment(nproc: int) -> dict[str, str]:
    """Return the environment for ``nproc`` ranks with this interpreter, without the variables of an outer launcher."""
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return clean | {"NPROC": str(nproc), "PYTHON": sys.executable}


def command(*words: str, small: Sequence[str] = SMALL) -> list[str]:
    """Return the command line of a launch; on the CPU, where any machine can start any number of ranks, by default."""
    return [str(ROOT / "scripts" / "launch.sh"), *words[:1], *small, "--distributed.device", "cpu", *words[1:]]


def launch(
    *words: str, nproc: int, exit_code: int = 0, small: Sequence[str] = SMALL
) -> subprocess.CompletedProcess[str]:
    """Run ``scripts/launch.sh`` to its end, and expect its exit code.

    Returns when the last process that holds the launcher's output is gone: one that is left behind causes a timeout.
    """
    line = command(*words, small=small)
    done = subprocess.run(line, env=environment(nproc), capture_output=True, text=True, timeout=300)
    assert done.returncode == exit_code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def end_at(step: int, run: Path, end: Callable[[subprocess.Popen[str]], None], *words: str) -> tuple[int, str]:
    """Start the run, with additional settings ``words``, and let ``end`` end it when it has logged ``step``.

    Returns:
        The launcher's exit code, and everything printed until the last process that holds its output was gone.
    """
    line = command("train", *LENGTH, *words, "--run.dir", str(run))
    earlier = read_metrics(run)  # Its last steps are dropped and taken again.
    with subprocess.Popen(
        line, env=environment(RANKS), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launcher:
        try:
            deadline = time.monotonic() + 120
            while not has_reached(step, run) or read_metrics(run) == earlier:
                assert launcher.poll() is None, f"the run ended too early:\n{launcher.communicate(timeout=60)[0]}"
                assert time.monotonic() < deadline, f"step {step} was not reached"
                time.sleep(0.005)
            end(launcher)
            output, _ = launcher.communicate(timeout=120)
        finally:
            launcher.kill()
    assert not has_reached(STEPS, run), "the ranks continued without their launcher"
    return launcher.returncode, output


def has_reached(step: int, run: Path) -> bool:
    """Return whether the run has logged ``step``."""
    return f'"step": {step},' in read_metrics(run)


def read_metrics(run: Path) -> str:
    """Return what the run has logged so far."""
    metrics = run / "metrics.jsonl"
    return metrics.read_text() if metrics.exists() else ""


def settings(*words: str) -> Any:
    """Return the settings of such a command line."""
    parsed = module("launch").parse(["train", *SMALL, *words], module("__main__").COMMANDS)[1]
    return module("config").Config(**parsed)


def global_batches(config: Any) -> tuple[int | None, Iterator[Any]]:
    """Return the steps per epoch (None if unknown), and all global batches, epoch after epoch, in this process."""
    data = module("data")
    train_set, _ = module("dataset").build_datasets(config)
    everything = SimpleNamespace(dp_rank=0, dp_size=1, device=torch.device("cpu"))
    #:: if cookiecutter.__plays ::#
    torch.manual_seed(config.run.seed)
    everything.module = everything.predict = module("model").build_model(config.model)
    #:: endif ::#
    seed, register = config.run.seed, lambda *_: None
    sampler, loader = data.build_train_loader(train_set, everything, config.data, seed, register, nullcontext)

    def batches() -> Iterator[Any]:
        for epoch in itertools.count():
            sampler.set_epoch(epoch)
            yield from loader

    return sampler.steps_per_epoch, batches()


def read_records(run: Path, event: str) -> list[dict[str, Any]]:
    """Return the records of one kind that a run wrote."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["event"] == event]


def newest_checkpoint(run: Path) -> Path:
    """Return the last checkpoint of a run, full or sharded."""
    return sorted((run / "checkpoints").glob("step-*"))[-1]


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint; a sharded one is converted first."""
    with TemporaryDirectory() as folder:
        if path.is_dir():
            full = Path(folder) / "full.pt"
            module("checkpoint").convert(path, full)
            path = full
        return torch.load(path, weights_only=True)


def load_model(run: Path) -> dict[str, torch.Tensor]:
    """Return the final weights of a run."""
    return read_checkpoint(newest_checkpoint(run))["model"]


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float = TOLERANCE) -> None:
    """Assert that each tensor differs by no more than ``tolerance`` of its norm."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        difference, size = float((value - theirs[name]).norm()), float(theirs[name].norm())
        assert difference <= tolerance * size, (
            f"{name} differs by {difference:.1e} of {size:.1e}; if its gradient is nothing but rounding, as that of an "
            "attention's key bias, AdamW makes full steps of it: raise optim.eps, or do without the parameter"
        )


def flip_bit(file: Path) -> None:
    """Flip one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
