"""The data, its loss and its metrics: UCI's optical digits.

``digits.npz`` holds 1,797 real images, split into training and test; ``digits.md`` names their source and license.
"""

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, default_collate

from .config import Config
from .reporting import Examples, draw_confusion, draw_images

FILE = Path(__file__).with_name("digits.npz")
CLASSES = 10
MOST_IMAGES = 40  # In the picture of misread digits.

# The metric that selects the best checkpoint, and whether higher is better.
BEST_METRIC, HIGHER_IS_BETTER = "accuracy", True

# Units of the curves of the loss and that metric.
UNITS = {"loss": "nats", "accuracy": "share of images"}

# Makes a batch, a pair (inputs, targets), of a list of samples.
collate_fn = default_collate


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Images of digits as ``(image, label)``: float32 of shape (1, 8, 8) from 0 to 1, and int64 from 0 to 9.

    Args:
        split: ``train`` (1,437 images) or ``test`` (360).
        max_shift: Shift each image by up to this many pixels in each direction, at random.
    """

    def __init__(self, split: str, max_shift: int = 0) -> None:
        with np.load(FILE) as arrays:
            images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
        # Images are padded once; a shifted image is a crop of the padded one.
        margin = ((0, 0), (max_shift, max_shift), (max_shift, max_shift))
        self.images = torch.from_numpy(np.pad(images.astype(np.float32) / 16, margin))
        self.labels = torch.from_numpy(labels.astype(np.int64))
        self.max_shift = max_shift

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return image ``index``, shifted by random numbers that the loader seeds with (run.seed, epoch, index)."""
        row, column = (random.randrange(2 * self.max_shift + 1) for _ in range(2)) if self.max_shift else (0, 0)
        return self.images[index, None, row : row + 8, column : column + 8], self.labels[index]


def build_datasets(config: Config) -> tuple[Digits, Digits]:
    """Return the training set with augmentation, and the test set without."""
    return Digits("train", config.dataset.max_shift), Digits("test")


def loss_fn(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """Return the sum of the cross-entropy of (batch, 10) logits for (batch,) labels, in nats, and what it is a sum of.

    The loss of a step is the sum over the global batch, divided by its weight. A weight that differs between batches,
    such as the tokens that are not padding, is returned as a tensor.
    """
    return F.cross_entropy(outputs.float(), targets, reduction="sum"), len(targets)


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


def examples(evaluator: Any) -> Examples:
    """Return files that show the last evaluation, each with a function that makes it; optional, called on all ranks."""
    metrics = evaluator.metrics
    if not metrics:
        return {}
    images, names = evaluator.samples.dataset.images, [str(label) for label in range(CLASSES)]
    target, prediction = metrics["target"], metrics["prediction"]
    misread = [index for index in np.argsort(-metrics["loss"]) if target[index] != prediction[index]]
    shown = misread[:MOST_IMAGES]
    captions = [f"{target[index]} as {prediction[index]}" for index in shown]
    title = f"{len(misread)} of {len(target)} test images are misread; those with the highest loss first"
    return {
        "confusion.png": partial(draw_confusion, target, prediction, names),
        "misread.png": partial(draw_images, [images[index].numpy() for index in shown], captions, title),
    }
