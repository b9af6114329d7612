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
    #:: if not fact("exact") or fact("loop") ::#
    TOLERANCE,
    #:: endif ::#
    assert_same,
    checkpoints,
    children,
    #:: if not fact("exact") or fact("loop") ::#
    deviation,
    #:: endif ::#
    end_at,
    family,
    kill_last_rank,
    #:: if not fact("exact") or fact("loop") ::#
    load,
    #:: endif ::#
    read_records,
    settings,
    train,
)

Trained = Callable[..., Path]


def interrupt_family(launcher: int) -> None:
    """Send SIGINT to the launcher and all its descendants, as a terminal does for Ctrl-C."""
    for member in reversed(family(launcher)):
        os.kill(member, signal.SIGINT)


# The exit code of each way to stop a run, and what stops it.
STOPS: dict[str, tuple[int, Callable[[int], None]]] = {
    "SIGTERM to the launcher": (143, lambda launcher: os.kill(launcher, signal.SIGTERM)),
    "Ctrl-C to every process": (130, interrupt_family),
    "SIGUSR1 to one rank": (143, lambda launcher: os.kill(children(launcher)[-1], signal.SIGUSR1)),
}


@pytest.mark.parametrize("nproc", sorted({RANKS, MORE_RANKS}))
def test_a_killed_run_that_lost_a_checkpoint_resumes_bitwise(
    trained: Trained, tmp_path: Path, record_property: Any, nproc: int
) -> None:
    code, _, err = end_at(14, tmp_path, kill_last_rank, nproc=nproc)
    assert code == 1 and "SIGKILL" in err.splitlines()[-1] and "Traceback" not in err, err
    *_, previous, newest = checkpoints(tmp_path)
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1  # One bit is wrong.
    newest.write_bytes(content)
    newest.with_name("step-00000099.pt.tmp").touch()  # A killed save leaves such a file.
    out, err = train(tmp_path, nproc=nproc)
    assert f"{newest.name} is not a readable checkpoint" in err
    assert f"step {int(previous.stem[5:])} of {STEPS}" in out
    assert_same(tmp_path, trained(nproc))
    record_property("weights", "bitwise equal")


@pytest.mark.parametrize("name", STOPS)
def test_a_stopped_run_loses_no_step(trained: Trained, tmp_path: Path, name: str) -> None:
    expected_code, stop = STOPS[name]
    workers = ("--data.num_workers", "1")
    code, out, err = end_at(6, tmp_path, stop, *workers)
    assert code == expected_code, out + err
    stopped = re.search(r"stopped after step (\d+)", out)
    assert stopped is not None, out + err
    assert checkpoints(tmp_path)[-1].stem == f"step-{int(stopped[1]):08d}", out + err
    assert "Traceback" not in err
    train(tmp_path, *workers)
    assert_same(tmp_path, trained())


def test_another_number_of_ranks_resumes(
    trained: Trained, tmp_path: Path, record_property: Any
) -> None:
    train(tmp_path, "--train.max_steps", "10", nproc=MORE_RANKS)
    train(tmp_path, nproc=1)
    #:: if fact("exact") and not fact("loop") ::#
    assert_same(tmp_path, trained())
    record_property("weights", "bitwise equal")
    #:: else ::#
    found = deviation(load(tmp_path)["model"], load(trained())["model"])
    record_property("weights", f"{found:.1e} (&le; {TOLERANCE:.0e})")
    assert found <= TOLERANCE
    for ours, theirs in zip(read_records(tmp_path), read_records(trained()), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE)
    #:: endif ::#


def test_changed_settings_act_from_the_first_step(tmp_path: Path) -> None:
    train(tmp_path, "--train.max_steps", "7")
    changes = ("--optim.lr", "5e-4", "--optim.weight_decay", "0.2")
    out, _ = train(tmp_path, *changes)
    assert "changed: optim.lr from 0.001 to 0.0005" in out
    config = settings(*changes)
    train_set, *_ = plain.module("dataset").build_datasets(config)
    scheduled_steps = config.train.epochs * (len(train_set) // config.data.global_batch_size)
    eighth = read_records(tmp_path)[7]
    assert eighth["step"] == 8
    expected = plain.learning_rate(7, scheduled_steps, config.optim)
    assert eighth["lr"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("words", [("--run.seed", "8"), ("--checkpoint.resume", "never")], ids=str)
def test_another_experiment_is_refused_by_name(
    trained: Trained, tmp_path: Path, words: tuple[str, str]
) -> None:
    run_dir = Path(shutil.copytree(trained(), tmp_path / "run"))
    _, err = train(run_dir, *words, "--train.max_steps", "30", code=2)
    assert re.fullmatch(rf"error: .*{words[0][2:]} is {words[1]}.*\n", err), err


def test_a_loss_that_is_not_finite_ends_the_run_by_its_step(tmp_path: Path) -> None:
    words = "--optim.lr 1e30 --optim.warmup_steps 3 --train.clip_grad_norm 1e30".split()
    words += "--train.log_every 10 --train.eval_every 5 --checkpoint.every_steps 5".split()
    _, err = train(tmp_path, *words, code=2)
    assert re.fullmatch(r"error: step [{{ 1 if fact('loop') else 2 }}-5] has {.*nan.*}; .*\n", err), err
    for path in checkpoints(tmp_path):
        model = torch.load(path, weights_only=True)["model"]
        assert all(value.isfinite().all() for value in model.values())
