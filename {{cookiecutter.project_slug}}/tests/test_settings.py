"""A mistake in the settings is rejected in one line that names it, before anything is started or written."""

from pathlib import Path

import pytest
import yaml

from support import RANKS, ROOT, launch


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["train", "--optim.learning_rate", "1"], "--optim.learning_rate"),
        (["train", "--optim.lr", "fast"], "optim.lr"),
        (["train", "--train.epochs", "0"], "train.epochs"),
        (["train", "--train.precision", "fp64"], "train.precision"),
        (["train", "--data.global_batch_size", "63", "--train.microbatches", "4"], "data.global_batch_size"),
        (["train", "--checkpoint.resume", "nowhere.pt"], "checkpoint.resume"),
        (["train", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["evaluate"], "--checkpoint"),
        (["evaluate", "--checkpoint", "nowhere.pt"], "nowhere.pt"),
        (["trian"], "trian"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_reported_in_one_line(tmp_path: Path, words: list[str], named: str) -> None:
    run = tmp_path / "run"
    arguments = [*words, "--run.dir", str(run)] if words != ["trian"] else words
    done = launch(*arguments, nproc=RANKS, exit_code=2)
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ")
    assert named in done.stderr
    assert not run.exists()


def test_an_unknown_key_in_a_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text("train:\n  epoch: 3\n")
    done = launch("train", "--config", str(file), nproc=RANKS, exit_code=2)
    assert done.stderr.count("\n") == 1, done.stderr
    assert "train.epoch'" in done.stderr


def test_the_shipped_file_agrees_with_the_defaults(tmp_path: Path) -> None:
    printed = launch("train", "--print_config", nproc=1, small=()).stdout
    defaults = yaml.safe_load(printed.replace("device: cpu", "device: auto"))
    for name, section in yaml.safe_load((ROOT / "configs" / "default.yaml").read_text()).items():
        assert section.items() <= defaults[name].items(), name
