"""The data, its loss and its metrics: UCI's optical digits.

``digits.npz`` holds 1,797 real images, split into training and test; ``digits.md`` names their source and license.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from .config import Config

FILE = Path(__file__).with_name("digits.npz")
CLASSES = 10

# The metric that selects the best checkpoint, and whether higher is better.
BEST_METRIC, HIGHER_IS_BETTER = "accuracy", True


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Images of digits as ``(image, label)``: float32 of shape (1, 8, 8) from 0 to 1, and int64 from 0 to 9.

    Args:
        split: ``train`` (1,437 images) or ``test`` (360).
        max_shift: Shift each image by up to this many pixels in each direction.
        seed: Seed of the shifts.
    """

    def __init__(self, split: str, max_shift: int = 0, seed: int = 0) -> None:
        with np.load(FILE) as arrays:
            images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
        # Images are padded once; a shifted image is a crop of the padded one.
        margin = ((0, 0), (max_shift, max_shift), (max_shift, max_shift))
        self.images = torch.from_numpy(np.pad(images.astype(np.float32) / 16, margin))
        self.labels = torch.from_numpy(labels.astype(np.int64))
        self.max_shift = max_shift
        self.seed = seed

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return sample ``index`` of ``epoch``; its shift depends only on (seed, epoch, index)."""
        epoch, index = key
        row = column = 0
        if self.max_shift:
            rng = np.random.default_rng((self.seed, epoch, index))
            row, column = rng.integers(0, 2 * self.max_shift + 1, size=2)
        return self.images[index, None, row : row + 8, column : column + 8], self.labels[index]


def build_datasets(config: Config) -> tuple[Digits, Digits]:
    """Return the training set with augmentation, and the test set without."""
    return Digits("train", config.dataset.max_shift, config.run.seed), Digits("test")


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of (batch, 10) logits for (batch,) labels, in nats."""
    return F.cross_entropy(outputs.float(), targets)


def per_sample_metrics(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return the per-sample metrics of a batch: tensors of shape (batch,) by name."""
    losses = F.cross_entropy(outputs.float(), targets, reduction="none")
    return {"loss": losses, "prediction": outputs.argmax(dim=1), "target": targets}


def aggregate_metrics(samples: dict[str, np.ndarray]) -> dict[str, float | list[float]]:
    """Aggregate the per-sample metrics of a whole split, which are arrays of shape (samples,) by name.

    Returns:
        ``loss`` (mean cross-entropy in nats), ``accuracy``, and ``class_accuracy``: the accuracy of each class.
    """
    correct = samples["prediction"] == samples["target"]
    return {
        "loss": float(samples["loss"].mean(dtype=np.float64)),
        "accuracy": float(correct.mean()),
        "class_accuracy": [float(correct[samples["target"] == c].mean()) for c in range(CLASSES)],
    }
