"""The digits, and how they are shifted."""

import torch

from support import module, settings

dataset = module("dataset")


def test_the_split_is_fixed() -> None:
    train_set, test_set = dataset.Digits("train"), dataset.Digits("test")
    assert (len(train_set), len(test_set)) == (1437, 360)
    image, label = test_set[0, 0]
    assert image.shape == (1, 8, 8) and image.dtype == torch.float32 and 0 <= image.min() <= image.max() <= 1
    assert label.dtype == torch.int64


def test_a_shift_depends_on_seed_epoch_and_index() -> None:
    train_set = dataset.Digits("train", max_shift=2, seed=1)
    assert torch.equal(train_set[3, 5][0], dataset.Digits("train", max_shift=2, seed=1)[3, 5][0])
    shifted = {tuple(train_set[epoch, 5][0].flatten().tolist()) for epoch in range(20)}
    assert len(shifted) > 5


def test_evaluation_does_not_shift_images() -> None:
    _, test_set = dataset.build_datasets(settings("--dataset.max_shift", "3"))
    assert torch.equal(test_set[0, 7][0], test_set[9, 7][0])
