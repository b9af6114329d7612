"""The digits, and how they are shifted."""

import torch

from support import module, settings

dataset = module("dataset")


def test_the_split_is_fixed() -> None:
    train_set, test_set = dataset.Digits("train"), dataset.Digits("test")
    assert (len(train_set), len(test_set)) == (1437, 360)
    image, label = test_set[0]
    assert image.shape == (1, 8, 8) and image.dtype == torch.float32 and 0 <= image.min() <= image.max() <= 1
    assert label.dtype == torch.int64


def test_a_training_image_is_shifted_differently_in_each_epoch() -> None:
    train_set, test_set = dataset.build_datasets(settings("--dataset.max_shift", "2"))
    for images, shifts in ((train_set, range(10, 21)), (test_set, [1])):
        seeded = module("splitting").SeededDataset(images, list, seed=1)
        shifted = {tuple(image.flatten().tolist()) for image, _ in seeded.__getitems__([(e, 5) for e in range(20)])}
        assert len(shifted) in shifts
