"""What is learned and measured: the losses, what they are a mean over, and the metrics."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .config import Config
from .distributed import wide_dtype
from .model import CLASSES


class Task:
    """The losses and metrics of the experiment; each rank builds one, and so do the tests."""

    best_metric = "accuracy"  # The best checkpoint is chosen by this metric of the validation set.
    higher_is_better = True

    def __init__(self, config: Config, device: torch.device) -> None:
        """Build what the losses need, such as a teacher, which is then frozen in eval mode."""

    def augment(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return a micro-batch as it is trained on, such as mixed; evaluation skips this."""
        return inputs, targets

    def prepare(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return a micro-batch with what is computed for it once, such as a teacher's outputs."""
        return inputs, targets

    def losses(self, outputs: Any, targets: Any) -> dict[str, Tensor]:
        """Return sums by name, of (batch, classes) logits and labels; only ``loss`` is trained."""
        # A second loss that this adds to `loss` is no part of the `loss` that metrics() returns.
        # Losses are computed in fp32 or fp64, even if the model computes in bf16 or fp16.
        return {"loss": F.cross_entropy(outputs.to(wide_dtype()), targets, reduction="sum")}

    def weight(self, targets: Any) -> int | Tensor:
        """Return what a micro-batch's losses are divided by; it may differ by micro-batch."""
        return len(targets)

    def metrics(self, outputs: Any, targets: Any) -> dict[str, Tensor]:
        """Return metrics of each sample, by name: tensors whose first dimension is the batch."""
        losses = F.cross_entropy(outputs.to(wide_dtype()), targets, reduction="none")
        return {"loss": losses, "prediction": outputs.argmax(dim=1), "target": targets}

    def aggregate(self, metrics: dict[str, np.ndarray]) -> dict[str, Any]:
        """Return the metrics of a set from those of its samples; ``loss`` is in nats."""
        target = metrics["target"]
        correct = metrics["prediction"] == target
        # A class without samples has an accuracy of NaN, which is logged as null.
        class_accuracy = [correct[target == label].mean() for label in range(CLASSES)]
        return {
            # A sum in float32 would lose digits where a set is large.
            "loss": metrics["loss"].mean(dtype=np.float64),
            "accuracy": correct.mean(),
            "class_accuracy": class_accuracy,
        }

    def throughput(self, samples_per_second: float) -> dict[str, float]:
        """Return further numbers on speed for the log, such as tokens per second; here, none."""
        return {}
