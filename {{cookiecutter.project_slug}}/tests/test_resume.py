"""A run that was killed, stopped, or lost a checkpoint ends as if nothing had happened."""

import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import plain
from support import (
    MORE_RANKS,
    RANKS,
    STEPS,
    TOLERANCE,
    assert_same,
    checkpoints,
    children,
    deviation,
    end_at,
    family,
    kill_last_rank,
    load,
    read_records,
    settings,
    train,
)

STOPS = {
    "SIGTERM to the launcher": (143, lambda pid: os.kill(pid, signal.SIGTERM)),
    "Ctrl-C to every process": (130, lambda pid: [os.kill(member, signal.SIGINT) for member in reversed(family(pid))]),
    "SIGUSR1 to one rank": (143, lambda pid: os.kill(children(pid)[-1], signal.SIGUSR1)),
}


@pytest.mark.parametrize("nproc", sorted({RANKS, MORE_RANKS}))
def test_a_killed_run_that_lost_a_checkpoint_resumes_bitwise(
    trained: Callable[..., Path], tmp_path: Path, record_property: Any, nproc: int
) -> None:
    code, _, err = end_at(14, tmp_path, kill_last_rank, nproc=nproc)
    assert code == 1 and "SIGKILL" in err.splitlines()[-1] and "Traceback" not in err, err
    *_, before, newest = checkpoints(tmp_path)
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1  # One bit.
    newest.write_bytes(content)
    newest.with_name("step-00000099.pt.tmp").touch()  # What a killed save leaves.
    out, err = train(tmp_path, nproc=nproc)
    assert f"{newest.name} is not a readable checkpoint" in err
    assert f"step {int(before.stem[5:])} of {STEPS}" in out
    assert_same(tmp_path, trained(nproc))
    record_property("weights", "bitwise equal")


@pytest.mark.parametrize("name", STOPS)
def test_a_stopped_run_loses_no_step(trained: Callable[..., Path], tmp_path: Path, name: str) -> None:
    (expected, end), workers = STOPS[name], ("--data.num_workers", "1")
    code, out, err = end_at(6, tmp_path, end, *workers)
    assert code == expected, out + err
    stopped = re.search(r"stopped after step (\d+)", out)
    assert stopped and checkpoints(tmp_path)[-1].stem == f"step-{int(stopped[1]):08d}", out + err
    assert "Traceback" not in err
    train(tmp_path, *workers)
    assert_same(tmp_path, trained())


def test_another_number_of_ranks_resumes(trained: Callable[..., Path], tmp_path: Path, record_property: Any) -> None:
    train(tmp_path, "--train.max_steps", "7", nproc=MORE_RANKS)
    train(tmp_path, nproc=1)
    found = deviation(load(tmp_path)["model"], load(trained())["model"])
    record_property("weights", f"{found:.1e} (&le; {TOLERANCE:.0e})")
    assert found <= TOLERANCE
    for ours, theirs in zip(read_records(tmp_path), read_records(trained()), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE)


def test_changed_settings_act_from_the_first_step(tmp_path: Path) -> None:
    train(tmp_path, "--train.max_steps", "7")
    changes = ("--optim.lr", "5e-4", "--optim.weight_decay", "0.2")
    out, _ = train(tmp_path, *changes)
    assert "changed: optim.lr from 0.001 to 0.0005" in out
    eighth, config = read_records(tmp_path)[7], settings(*changes)
    assert eighth["step"] == 8
    train_set, *_ = plain.module("dataset").build_datasets(config)
    steps = config.train.epochs * (len(train_set) // config.data.global_batch_size)
    assert eighth["lr"] == pytest.approx(plain.learning_rate(7, steps, config.optim), rel=1e-12)


@pytest.mark.parametrize("words", [("--run.seed", "8"), ("--checkpoint.resume", "never")], ids=str)
def test_another_experiment_is_refused_by_name(trained: Callable[..., Path], tmp_path: Path, words: list[str]) -> None:
    run = Path(shutil.copytree(trained(), tmp_path / "run"))
    _, err = train(run, *words, "--train.max_steps", "30", code=2)
    assert re.fullmatch(rf"error: .*{words[0][2:]} is {words[1]}.*\n", err), err


def test_a_loss_that_is_not_finite_ends_the_run_by_its_step(tmp_path: Path) -> None:
    explosion = ("--optim.lr", "1e30", "--optim.warmup_steps", "3", "--train.log_every", "10", "--train.eval_every=5")
    _, err = train(tmp_path, *explosion, "--checkpoint.every_steps", "5", "--train.clip_grad_norm=1e30", code=2)
    assert re.fullmatch(r"error: step [{{ 1 if fact('loop') else 2 }}-5] has {.*nan.*}; .*\n", err), err
    for path in checkpoints(tmp_path):
        model = torch.load(path, weights_only=True)["model"]
        assert all(value.isfinite().all() for value in model.values())
