"""The data: UCI's optical digits, 1,797 real images; ``digits.md`` names their source and license."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, default_collate

from .config import Config

VALIDATION = 237  # Images of the training set that are kept for validation.
collate_fn = default_collate  # Makes a batch, a pair (inputs, targets), of a list of samples.


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Images of ``train`` or ``test``, each with its label: float32 of shape (1, 8, 8) from 0 to 1, and int64."""

    def __init__(self, split: str, max_shift: int = 0) -> None:
        with np.load(Path(__file__).with_name("digits.npz")) as arrays:
            images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
        margin = ((0, 0), (max_shift, max_shift), (max_shift, max_shift))  # A shifted image is a crop.
        self.images = torch.from_numpy(np.pad(images.astype(np.float32) / 16, margin))
        self.labels = torch.from_numpy(labels.astype(np.int64))
        self.max_shift = max_shift

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return image ``index``, shifted by random numbers that the loader seeds with (run.seed, epoch, index)."""
        row, column = (random.randrange(2 * self.max_shift + 1) for _ in range(2)) if self.max_shift else (0, 0)
        return self.images[index, None, row : row + 8, column : column + 8], self.labels[index]


def build_datasets(config: Config) -> tuple[Any, Any, Any]:
    """Return the sets for training (augmented), validation and test; random splits draw from ``run.seed``."""
    order = torch.randperm(len(whole := Digits("train", config.dataset.max_shift))).tolist()
    return Subset(whole, order[VALIDATION:]), Subset(Digits("train"), order[:VALIDATION]), Digits("test")
