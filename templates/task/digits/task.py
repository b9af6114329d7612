"""What is learned and measured: the losses, what they are a mean over, and the metrics."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .config import Config
from .model import CLASSES


class Task:
    """The losses and metrics of an experiment; each rank builds one, and so does the plain loop of the tests."""

    best_metric, higher_is_better = "accuracy", True  # They select the best checkpoint.

    def __init__(self, config: Config, device: torch.device) -> None:
        """Load what the losses need, such as a teacher: modules are frozen, in eval mode, on ``device``."""

    def prepare(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return a local batch with what is computed once for it, such as a teacher's outputs, without gradients."""
        return inputs, targets

    def losses(self, outputs: Any, targets: Any) -> dict[str, Tensor]:
        """Return sums over a micro-batch, by name, of (batch, classes) logits and labels; ``loss`` is minimized."""
        return {"loss": F.cross_entropy(outputs.float(), targets, reduction="sum")}

    def weight(self, targets: Any) -> int | Tensor:
        """Return what losses are divided by for their mean: the number of samples; a tensor if local batches differ."""
        return len(targets)

    def metrics(self, outputs: Any, targets: Any) -> dict[str, Tensor]:
        """Return the metrics of each sample of a batch, by name: tensors whose first dimension is the batch."""
        losses = F.cross_entropy(outputs.float(), targets, reduction="none")
        return {"loss": losses, "prediction": outputs.argmax(dim=1), "target": targets}

    def aggregate(self, metrics: dict[str, np.ndarray]) -> dict[str, Any]:
        """Return the metrics of a split, from those of its samples in the dataset's order; ``loss`` is in nats."""
        correct, target = metrics["prediction"] == metrics["target"], metrics["target"]
        of_class = [correct[target == label].mean() for label in range(CLASSES)]
        return {"loss": metrics["loss"].mean(dtype=np.float64), "accuracy": correct.mean(), "class_accuracy": of_class}

    def throughput(self, samples_per_second: float) -> dict[str, float]:
        """Return what a record of training also has to say about its speed."""
        return {}
