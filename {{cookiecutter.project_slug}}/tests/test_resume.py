"""A run that was killed, stopped, or lost a checkpoint ends as if nothing had happened."""

import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import plain
import support
from support import checkpoints, children, family, send, train

# The exit code of each way to stop a run, and what stops it.
STOPS: dict[str, Any] = {
    "SIGTERM to the launcher": (143, lambda pid: send(signal.SIGTERM, [pid])),
    "Ctrl-C to every process": (130, lambda pid: send(signal.SIGINT, family(pid))),
    "SIGUSR1 to one rank": (143, lambda pid: send(signal.SIGUSR1, children(pid)[-1:])),
}


@pytest.mark.parametrize("nproc", sorted({support.RANKS, support.MORE_RANKS}))
def test_a_killed_run_that_lost_a_checkpoint_resumes_bitwise(
    trained: Any, tmp_path: Path, record_property: Any, nproc: int
) -> None:
    # The last rank writes no files if there are several.
    code, _, err = support.end_at(
        14, tmp_path, lambda pid: send(signal.SIGKILL, children(pid)[-1:]), nproc=nproc
    )
    assert code == 1 and "SIGKILL" in err.splitlines()[-1] and "Traceback" not in err, err
    *_, previous, newest = checkpoints(tmp_path)
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1  # One bit is wrong.
    newest.write_bytes(content)
    newest.with_name("step-00000099.pt.tmp").touch()  # A killed save leaves such a file.
    out, err = train(tmp_path, nproc=nproc)
    assert f"{newest.name} is not a readable checkpoint" in err
    assert f"step {int(previous.stem[5:])} of {support.STEPS}" in out
    support.assert_same(tmp_path, trained(nproc))
    record_property("weights", "bitwise equal")


@pytest.mark.parametrize("name", STOPS)
def test_a_stopped_run_loses_no_step(trained: Any, tmp_path: Path, name: str) -> None:
    expected_code, stop = STOPS[name]
    workers = ("--data.num_workers", "1")
    code, out, err = support.end_at(6, tmp_path, stop, *workers)
    assert code == expected_code, out + err
    stopped = re.search(r"stopped after step (\d+)", out)
    assert stopped is not None, out + err
    assert checkpoints(tmp_path)[-1].stem == f"step-{int(stopped[1]):08d}", out + err
    assert "Traceback" not in err
    train(tmp_path, *workers)
    support.assert_same(tmp_path, trained())


def test_another_number_of_ranks_resumes(
    trained: Any, tmp_path: Path, record_property: Any
) -> None:
    train(tmp_path, "--train.max_steps", "10", nproc=support.MORE_RANKS)
    train(tmp_path, nproc=1)
    #:: if fact("exact") and not fact("loop") ::#
    support.assert_same(tmp_path, trained())
    record_property("weights", "bitwise equal")
    #:: else ::#
    found = support.deviation(support.load(tmp_path)["model"], support.load(trained())["model"])
    record_property("weights", f"{found:.1e} (&le; {support.TOLERANCE:.0e})")
    assert found <= support.TOLERANCE
    records = support.read_records(tmp_path)
    for ours, theirs in zip(records, support.read_records(trained()), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=support.TOLERANCE)
    #:: endif ::#


def test_changed_settings_act_from_the_first_step(tmp_path: Path) -> None:
    train(tmp_path, "--train.max_steps", "7")
    changes = ("--optim.lr", "5e-4", "--optim.weight_decay", "0.2")
    out, _ = train(tmp_path, *changes)
    assert "changed: optim.lr from 0.001 to 0.0005" in out
    records, _ = plain.train(support.settings("--train.max_steps", "8", *changes))
    eighth = support.read_records(tmp_path)[7]
    assert eighth["step"] == 8 and eighth["lr"] == pytest.approx(records[7]["lr"], rel=1e-12)


@pytest.mark.parametrize("words", [("--run.seed", "8"), ("--checkpoint.resume", "never")], ids=str)
def test_another_experiment_is_refused_by_name(
    trained: Any, tmp_path: Path, words: tuple[str, str]
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
