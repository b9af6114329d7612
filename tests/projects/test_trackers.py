"""Each tracking service, read back, has every record of a killed and resumed run once, and its settings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from conftest import Bake, launch, launch_and_kill, read_records
from trackers import READERS

pytestmark = pytest.mark.long

STEPS, SAVED = 300, 100  # W&B writes 50 records at a time.
TRAIN = (
    f"train --distributed.device cpu --train.max_steps {STEPS} --train.log_every 1 --train.eval_every {SAVED}".split()
)
TRAIN += "--data.global_batch_size 32 --model.width 8 --model.depth 1 --optim.lr 0.00321".split()


@pytest.fixture(autouse=True)
def without_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No key and no server of whoever runs the tests, and no traffic."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.mark.parametrize(
    "service", [pytest.param(each, marks=[pytest.mark.weekly] * (each == "mlflow")) for each in READERS]
)
def test_a_service_has_each_record_once_after_a_kill_and_a_resume(bake: Bake, tmp_path: Path, service: str) -> None:
    project, folder = bake(tracker=service), tmp_path / "runs" / "a"
    words = (*TRAIN, "--run.dir", folder)
    launch_and_kill(project, *words, when=lambda: len(read_records(folder)) > SAVED + 60)
    killed = read_records(folder)[-1]["step"]
    resumed = killed - killed % SAVED
    tracked = max(READERS[service](folder)[0]["train/loss"])[0]
    assert resumed < tracked <= killed < STEPS, "there is a record that the resumed run writes again"
    result = launch(project, *words)
    assert f"step {resumed} of {STEPS}" in result.stdout and "warning" not in result.stderr

    points, settings = READERS[service](folder)
    for event, split, name, every in (("train", "train", "loss", 1), ("eval", "test", "accuracy", SAVED)):
        records = [record for record in read_records(folder) if record["event"] == event]
        assert [record["step"] for record in records] == [*range(every, STEPS + 1, every)]
        expected = [(record["step"], pytest.approx(record[name], rel=1e-6)) for record in records]
        assert sorted(points[f"{split}/{name}"]) == expected
    assert "0.00321" in settings
