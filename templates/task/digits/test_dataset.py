"""The digits, and how they are moved."""

from __future__ import annotations

from importlib import import_module

import torch

from support import settings

dataset = import_module("{{ cookiecutter.__package }}.dataset")


def test_the_split_is_fixed() -> None:
    train_set, test_set = dataset.Digits("train"), dataset.Digits("test")
    assert (len(train_set), len(test_set)) == (1437, 360)
    image, label = test_set[0, 0]
    assert image.shape == (1, 8, 8) and image.dtype == torch.float32 and 0 <= image.min() <= image.max() <= 1
    assert label.dtype == torch.int64


def test_an_image_moves_by_seed_epoch_and_index() -> None:
    train_set, still = dataset.Digits("train", max_shift=2, seed=1), dataset.Digits("train")
    assert torch.equal(train_set[3, 5][0], dataset.Digits("train", max_shift=2, seed=1)[3, 5][0])
    moved = [train_set[epoch, 5][0] for epoch in range(20)]
    assert len({tuple(image.flatten().tolist()) for image in moved}) > 5
    assert any(torch.equal(image, still[0, 5][0]) for image in moved) or len(moved) == 20


def test_evaluation_sees_images_as_they_are() -> None:
    _, test_set = dataset.build_datasets(settings("--dataset.max_shift", "3"))
    assert torch.equal(test_set[0, 7][0], test_set[9, 7][0])
