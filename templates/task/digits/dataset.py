"""The data: UCI's optical digits, 1,797 images; ``digits.md`` names their source and license."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, default_collate

from .config import Config

VALIDATION = 237  # Images of the training set that are kept for validation.

# The loader turns a list of samples into a batch by this function: a pair (inputs, targets).
collate_fn = default_collate


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """The images of a split, float32 of shape (1, 8, 8) from 0 to 1, and their labels, int64."""

    def __init__(self, split: str, max_shift: int = 0) -> None:
        with np.load(Path(__file__).with_name("digits.npz")) as arrays:
            images = arrays[f"{split}_images"]
            labels = arrays[f"{split}_labels"]
        pixels = torch.from_numpy(images) / 16  # Pixels in the file are integers from 0 to 16.
        # A margin of zeros makes any crop of 8x8 pixels a shifted image.
        self.images = torch.nn.functional.pad(pixels, [max_shift] * 4)
        self.labels = torch.from_numpy(labels).long()
        self.max_shift = max_shift

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return an image, shifted at random by up to ``max_shift`` pixels, and its label."""
        # The loader has seeded `random` with (run.seed, epoch, index), whichever rank reads this.
        row = random.randrange(2 * self.max_shift + 1)
        column = random.randrange(2 * self.max_shift + 1)
        image = self.images[index, None, row : row + 8, column : column + 8]
        return image, self.labels[index]


def build_datasets(config: Config) -> tuple[Any, Any, Any]:
    """Return the sets for training, validation and test, the same on all ranks."""
    augmented = Digits("train", config.dataset.max_shift)
    # PyTorch's global generator was seeded with run.seed before, so all ranks draw the same order.
    order = torch.randperm(len(augmented)).tolist()
    train_set = Subset(augmented, order[VALIDATION:])
    validation_set = Subset(Digits("train"), order[:VALIDATION])
    return train_set, validation_set, Digits("test")
