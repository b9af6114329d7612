"""A run resumes with other settings than it was started with: they take effect and are reported, or are rejected."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Bake
from runs import alone, checkpoints, newest_checkpoint, records, weights

pytestmark = pytest.mark.slow

# Of the 22 steps of an epoch, the first six.
STEPS = "--train.max_steps 6 --train.log_every 1 --checkpoint.every_steps 3 --distributed.device cpu".split()
LONGER = [*STEPS, "--train.max_steps", "9"]


@pytest.fixture(scope="module")
def project(baked: Bake) -> Path:
    return baked()


@pytest.fixture(scope="module")
def started(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps, saved in the middle of its first epoch."""
    folder = tmp_path_factory.mktemp("run") / "started"
    alone(project, "train", *STEPS, "--run.dir", folder)
    return folder


@pytest.fixture
def run(started: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(started, tmp_path / "run"))


def reported(stderr: str) -> set[str]:
    """Return the lines about settings, without those that name the run's directory."""
    return {line for line in stderr.splitlines() if " from now on; it was " in line or "is ignored" in line}


def test_the_same_settings_report_nothing(project: Path, run: Path) -> None:
    assert reported(alone(project, "train", *STEPS, "--run.dir", run).stderr) == set()


def test_a_changed_optimizer_and_schedule_act_from_the_first_step_on(project: Path, run: Path) -> None:
    before = weights(run)
    changes = "--optim.lr 1e-9 --optim.weight_decay 0.25 --optim.betas [0.5,0.75] --optim.warmup_steps 1".split()
    resumed = alone(project, "train", *LONGER, *changes, "--run.dir", run)
    assert reported(resumed.stderr) == {
        "optim.lr is 1e-09 from now on; it was 0.004",
        "optim.warmup_steps is 1 from now on; it was 40",
        "optim.weight_decay is 0.25 from now on; it was 0.05",
        "optim.betas is (0.5, 0.75) from now on; it was (0.9, 0.99)",
        "train.max_steps is 9 from now on; it was 6",
    }
    # Warm-up is over, the decay has hardly begun, and such steps move nothing.
    rates = [record["lr"] for record in records(run, "train")]
    assert rates[:6] == pytest.approx([4e-3 * step / 40 for step in range(1, 7)])
    assert rates[6:] == pytest.approx([1e-9] * 3, rel=1e-3)
    assert all(torch.allclose(value, before[name], atol=1e-7) for name, value in weights(run).items())
    groups = torch.load(newest_checkpoint(run), weights_only=True)["param_groups"]
    assert [(group["weight_decay"], group["betas"]) for group in groups] == [(0.25, (0.5, 0.75)), (0.0, (0.5, 0.75))]


def test_a_run_resumes_in_another_precision(project: Path, run: Path) -> None:
    """The scaler of fp16 starts anew, because the checkpoint has none."""
    printed = alone(project, "train", *LONGER, "--train.precision", "fp16", "--run.dir", run)
    assert "train.precision is fp16" in printed.stderr and "resuming from the one before" not in printed.stderr
    assert records(run, "train")[-1]["step"] == 9


def test_more_epochs_lengthen_the_schedule(project: Path, run: Path) -> None:
    words = "--optim.warmup_steps 1 --train.epochs".split()
    rates = {}
    for epochs in ("1", "2"):
        folder = Path(shutil.copytree(run, run.with_name(epochs)))
        alone(project, "train", *LONGER, *words, epochs, "--run.dir", folder)
        rates[epochs] = records(folder, "train")[-1]["lr"]
    assert rates["1"] < 0.9 * rates["2"]


@pytest.mark.parametrize(
    ("setting", "value", "saved"),
    [
        ("model.depth", "4", "3"),
        ("dataset.max_shift", "2", "1"),
        ("data.global_batch_size", "32", "64"),
        ("run.seed", "5", "0"),
    ],
)
def test_a_change_that_cannot_take_effect_is_rejected(
    project: Path, run: Path, setting: str, value: str, saved: str
) -> None:
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    rejected = alone(project, "train", *LONGER, f"--{setting}", value, "--run.dir", run, expect=2).stderr
    assert rejected.count("\n") == 1 and f"{setting} is {value}, and {saved} in the checkpoint" in rejected
    assert files == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_the_global_batch_may_change_between_epochs(project: Path, tmp_path: Path) -> None:
    words = "--train.log_every 1 --distributed.device cpu --train.epochs".split()
    alone(project, "train", *words, "1", "--run.dir", tmp_path)
    resumed = alone(project, "train", *words, "2", "--data.global_batch_size", "128", "--run.dir", tmp_path)
    assert "data.global_batch_size is 128 from now on; it was 64" in resumed.stderr
    assert [record["epoch"] for record in records(tmp_path, "train")] == [0] * 22 + [1] * 11


def test_the_command_that_started_from_a_path_resumes_its_run(project: Path, started: Path, tmp_path: Path) -> None:
    words = [*STEPS, "--checkpoint.resume", started / "checkpoints/step-00000003.pt", "--run.dir", tmp_path / "run"]
    assert "step 3 of 5" in alone(project, "train", *words, "--train.max_steps", "5").stdout
    assert "step 5 of 6" in alone(project, "train", *words).stdout
    assert checkpoints(tmp_path / "run") == ["step-00000005.pt", "step-00000006.pt"]
    # The path is no longer needed, as the run has checkpoints of its own.
    words[words.index("--checkpoint.resume") + 1] = "nowhere.pt"
    other = alone(project, "train", *words, expect=2).stderr
    assert "no such file" in other


def rewrite(run: Path, change: dict[str, Any], without: str) -> None:
    """Make the settings of the newest checkpoint look like those of another version of the project."""
    path = newest_checkpoint(run)
    content = torch.load(path, weights_only=True)
    section, name = without.split(".")
    del content["config"][section][name]
    content["config"]["train"] |= change
    torch.save(content, path)


def test_a_checkpoint_of_another_version_of_the_settings_is_resumed_and_evaluated(project: Path, run: Path) -> None:
    rewrite(run, {"removed": 1}, without="train.exact")
    rewrite(run, {}, without="model.norm")
    resumed = alone(project, "train", *LONGER, "--run.dir", run)
    assert reported(resumed.stderr) == {
        "train.removed of the checkpoint is ignored: there is no such setting",
        "train.max_steps is 9 from now on; it was 6",
    }
    rewrite(run, {}, without="model.norm")
    record = json.loads(alone(project, "evaluate", "--checkpoint", newest_checkpoint(run)).stdout.splitlines()[-1])
    assert record["loss"] == records(run, "eval")[-1]["loss"]


def test_a_setting_that_an_old_checkpoint_lacks_had_its_default(project: Path, run: Path) -> None:
    rewrite(run, {}, without="model.norm")
    rejected = alone(project, "train", *LONGER, "--model.norm", "batch", "--run.dir", run, expect=2).stderr
    assert "model.norm is batch, and group in the checkpoint" in rejected
