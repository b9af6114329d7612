"""The text, its windows, and the metrics of what the model predicts."""

import math
import pickle
from pathlib import Path

import pytest
import torch

from support import module, settings

dataset, build_model = module("dataset"), module("model").build_model
UserError = module("config").UserError

TEXT = bytes(range(256)) * 4


def windows_of(path: Path, cache: Path, *words: str) -> list[bytes]:
    """Return the training and the test split of a text, as windows of 10 bytes return them."""
    arguments = ("--dataset.path", str(path), "--dataset.cache", str(cache), "--dataset.test_bytes", "101")
    splits = dataset.build_datasets(settings(*arguments, "--model.context", "10", *words))
    return [bytes(torch.cat([split[i][0] for i in range(len(split))]).tolist()) for split in splits]


def test_windows_are_consecutive_and_include_the_next_byte(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(TEXT)
    train, test = windows_of(file, tmp_path)
    assert train == TEXT[:920] and test == TEXT[-101:-1]
    windows = dataset.Windows(file, 0, 923, 10)
    for same in (windows, pickle.loads(pickle.dumps(windows))):
        inputs, targets = same[3]
        assert inputs.dtype == targets.dtype == torch.int64
        assert (bytes(inputs.tolist()), bytes(targets.tolist())) == (TEXT[30:40], TEXT[31:41])
    assert len(pickle.dumps(windows)) < 500  # Not a copy of the text.


def test_the_text_files_of_a_folder_are_concatenated_once(tmp_path: Path) -> None:
    folder, cache = tmp_path / "texts", tmp_path / "cache"
    (folder / "part" / ".hidden").mkdir(parents=True)
    (folder / "part" / ".hidden" / "a.txt").write_text("no" * 100)
    (folder / "binary").write_bytes(TEXT)
    for name in "abc":
        (folder / "part" / f"{name}.txt").write_text(name * 500)
    whole = b"".join(windows_of(folder, cache))
    assert set(whole) == set(b"abc") and len(whole) > 1480
    assert windows_of(folder, cache, "--dataset.max_bytes", "300")[0][:100] == whole[:100]
    assert len(list(cache.iterdir())) == 2
    windows_of(folder, cache)
    assert len(list(cache.iterdir())) == 2
    (folder / "part" / "a.txt").write_text("A" * 600)
    assert b"".join(windows_of(folder, cache)).count(b"A") > 400


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--dataset.path nowhere", "dataset.path is nowhere"),
        ("--model.width 30 --model.heads 4", "model.width is 30, .* 32 would"),
    ],
)
def test_settings_that_cannot_work_are_rejected(words: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        settings(*words.split()).check()


def test_too_little_text_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"dataset.path is {tmp_path}, of which 0 bytes are used"):
        windows_of(tmp_path, tmp_path / "cache")
    with pytest.raises(UserError, match="20000 bytes are used"):
        dataset.build_datasets(settings("--dataset.max_bytes", "20000"))


def test_the_metrics_are_those_of_the_bytes() -> None:
    outputs, targets = torch.randn(3, 5, 256), torch.randint(256, (3, 5))
    probabilities = outputs.double().softmax(dim=2).gather(2, targets[..., None])
    loss = -probabilities.log().mean().item()
    per_sample = {name: values.numpy() for name, values in dataset.per_sample_metrics(outputs, targets).items()}
    metrics = dataset.aggregate_metrics(per_sample)
    assert metrics == pytest.approx({"loss": loss, "bits_per_byte": loss / math.log(2), "perplexity": math.exp(loss)})
    total, weight = dataset.loss_fn(outputs, targets)
    assert weight == 15 and total.item() / weight == pytest.approx(loss)


def test_no_position_sees_later_bytes() -> None:
    model = build_model(settings().model)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    one = torch.randint(256, (1, 32))
    other = one.clone()
    other[0, 20:] = (other[0, 20:] + 1) % 256
    with torch.no_grad():
        different = (model(one) - model(other)).abs().amax(dim=2)[0]
    assert (different[:20] < 1e-6).all() and (different[20:] > 1e-3).all()
