"""A mistake in the settings is named in one line before any rank starts or any file is written."""

from pathlib import Path

import pytest

from support import launch


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["train", "--optim.learning_rate", "1"], "--optim.learning_rate"),
        (["train", "--optim.lr", "fast"], "optim.lr"),
        (["train", "--run.dir", "{}/wrong.yaml/run"], "run.dir"),
        (["train", "--train.epochs", "0"], "train.epochs"),
        (["train", "--data.micro_batch_size", "7"], "data.global_batch_size"),
        (["train", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["train", "--config", "{}/wrong.yaml"], "train.epoch'"),
        (["train", "--config", "{}/twice.yaml"], "train is given twice"),
        (["evaluate"], "checkpoint"),
        (["evaluate", "--checkpoint", "nowhere.pt"], "nowhere.pt"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_reported_in_one_line(tmp_path: Path, words: list[str], named: str) -> None:
    (tmp_path / "wrong.yaml").write_text("train:\n  epoch: 3\n")
    (tmp_path / "twice.yaml").write_text("train:\n  epochs: 3\ntrain:\n  max_steps: 2\n")
    command, *arguments = [word.format(tmp_path) for word in words]
    run_dir = tmp_path / "run"
    _, err = launch(command, "--run.dir", str(run_dir), *arguments, code=2)
    assert err.startswith("error: ") and err.count("\n") == 1 and named in err, err
    assert not run_dir.exists()
