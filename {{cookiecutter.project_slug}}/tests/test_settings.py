"""A mistake in the settings is rejected in one line that names it, before any rank is started or anything written."""

from pathlib import Path

import pytest

from support import launch


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["train", "--optim.learning_rate", "1"], "--optim.learning_rate"),
        (["train", "--optim.lr", "fast"], "optim.lr"),
        (["train", "--optim.lr", "inf"], "optim.lr"),
        (["train", "--train.epochs", "0"], "train.epochs"),
        (["train", "--train.precision", "fp64"], "train.precision"),
        (["train", "--data.global_batch_size", "63", "--train.microbatches", "4"], "data.global_batch_size"),
        (["train", "--model.weights", "nowhere.pt"], "model.weights"),
        (["train", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["train", "--config", "{}/wrong.yaml"], "train.epoch'"),
        (["train", "--config", "{}/twice.yaml"], "train is given twice"),
        (["evaluate"], "checkpoint"),
        (["evaluate", "--checkpoint", "nowhere.pt"], "nowhere.pt"),
        (["trian"], "trian"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_reported_in_one_line(tmp_path: Path, words: list[str], named: str) -> None:
    (tmp_path / "wrong.yaml").write_text("train:\n  epoch: 3\n")
    (tmp_path / "twice.yaml").write_text("train:\n  epochs: 3\ntrain:\n  max_steps: 2\n")
    arguments = [word.format(tmp_path) for word in words]
    run = ["--run.dir", str(tmp_path / "run")] if words != ["trian"] else []
    _, err = launch(*arguments, *run, code=2)
    assert err.count("\n") == 1 and err.startswith("error: ") and named in err, err
    assert not (tmp_path / "run").exists()
