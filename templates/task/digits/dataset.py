"""The data: UCI's optical digits, and what a batch of them means (loss, scores, figures).

``digits.npz`` holds 1,797 real images and their split into training and test; ``digits.md`` tells their origin.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from .config import Config

FILE = Path(__file__).with_name("digits.npz")
CLASSES = 10

# The figure by which the best checkpoint is chosen, and whether more of it is better.
BEST_BY, HIGHER_IS_BETTER = "accuracy", True


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Images of digits as ``(image, label)``: float32 of shape (1, 8, 8) in 0 ... 1, and int64 in 0 ... 9.

    Args:
        split: ``train`` (1,437 images) or ``test`` (360).
        max_shift: Move an image by up to this many pixels each way; 0 leaves it as it is.
        seed: Seed of the shifts.
    """

    def __init__(self, split: str, max_shift: int = 0, seed: int = 0) -> None:
        with np.load(FILE) as arrays:
            images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
        # Room around an image for its shifts; without a shift the middle is cut out again.
        margin = ((0, 0), (max_shift, max_shift), (max_shift, max_shift))
        self.images = torch.from_numpy(np.pad(images.astype(np.float32) / 16, margin))
        self.labels = torch.from_numpy(labels.astype(np.int64))
        self.max_shift = max_shift
        self.seed = seed

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """The sample ``index``, as it is in ``epoch``: the shift depends on (seed, epoch, index) alone."""
        epoch, index = key
        row = column = 0
        if self.max_shift:
            random = np.random.default_rng((self.seed, epoch, index))
            row, column = random.integers(0, 2 * self.max_shift + 1, size=2)
        return self.images[index, None, row : row + 8, column : column + 8], self.labels[index]


def build_datasets(config: Config) -> tuple[Digits, Digits]:
    """The training set, augmented, and the test set, as it is."""
    return Digits("train", config.dataset.max_shift, config.run.seed), Digits("test")


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of (batch, 10) logits for (batch,) labels, in nats."""
    return F.cross_entropy(outputs.float(), targets)


def score(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """What evaluation keeps of a batch: one value a sample and name, each of shape (batch,)."""
    losses = F.cross_entropy(outputs.float(), targets, reduction="none")
    return {"loss": losses, "prediction": outputs.argmax(dim=1), "target": targets}


def figures(scores: dict[str, np.ndarray]) -> dict[str, float | list[float]]:
    """The figures of a whole split from the scores of all its samples, each of shape (samples,).

    Returns:
        ``loss`` (mean cross-entropy in nats), ``accuracy``, and ``class_accuracy``: the accuracy of each class.
    """
    right = scores["prediction"] == scores["target"]
    return {
        "loss": float(scores["loss"].mean(dtype=np.float64)),
        "accuracy": float(right.mean()),
        "class_accuracy": [float(right[scores["target"] == c].mean()) for c in range(CLASSES)],
    }
