"""A mistake in the settings is rejected in one line that names it, before any rank is started or anything written."""

from pathlib import Path

import pytest
import yaml

from support import ROOT, launch


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
        (["train", "--config", "wrong.yaml"], "train.epoch'"),
        (["train", "--config", "twice.yaml"], "train is given twice"),
        (["evaluate"], "checkpoint"),
        (["evaluate", "--checkpoint", "nowhere.pt"], "nowhere.pt"),
        (["trian"], "trian"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wrong.yaml").write_text("train:\n  epoch: 3\n")
    Path("twice.yaml").write_text("train:\n  epochs: 3\ntrain:\n  max_steps: 2\n")
    arguments = [*words, "--run.dir", "run"] if words != ["trian"] else words
    _, err = launch(*arguments, code=2)
    assert err.count("\n") == 1 and err.startswith("error: ") and named in err, err
    assert not Path("run").exists()


def test_the_experiment_does_not_repeat_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("{}")
    defaults = yaml.safe_load(launch("train", "--config", str(tmp_path / "empty.yaml"), "--print_config")[0])
    for name, section in yaml.safe_load((ROOT / "configs" / "default.yaml").read_text()).items():
        assert not section.items() & defaults[name].items(), name
