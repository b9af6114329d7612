"""What is learned and measured: the losses, what they are a mean over, and the metrics."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from .config import Config
from .dataset import describe
from .distributed import wide_dtype
from .model import build_model

# NVIDIA's data sheets give these 10^12 operations per second, in bf16 without sparsity.
PEAKS = {"NVIDIA A100-SXM4-80GB": 312.0, "NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H200": 989.4}


class Task:
    """The losses and metrics of the experiment; each rank builds one, and so do the tests."""

    best_metric = "bits_per_byte"  # The best checkpoint is chosen by this metric, of validation.
    higher_is_better = False

    def __init__(self, config: Config, device: torch.device) -> None:
        """Build what the losses need, such as a teacher, which is then frozen in eval mode."""
        self.context = config.model.context
        self.description = describe(config.dataset.path)
        self.operations_per_token = count_operations(config)
        # A device that PEAKS does not name has no known peak, so mfu is not logged.
        self.peak_per_rank = 0.0
        if device.type == "cuda":
            devices = getattr(config.parallel, "devices", 1)  # Some strategies use several.
            peak = PEAKS.get(torch.cuda.get_device_name(device), 0.0)
            self.peak_per_rank = 1e12 * peak * devices

    def augment(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return a micro-batch as it is trained on, such as mixed; evaluation skips this."""
        return inputs, targets

    def prepare(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return a micro-batch with what is computed for it once, such as a teacher's outputs."""
        return inputs, targets

    def losses(self, outputs: Any, targets: Any) -> dict[str, Tensor]:
        """Return sums by name, of logits and (batch, time) targets; only ``loss`` is trained."""
        # A second loss that this adds to `loss` is no part of the `loss` that metrics() returns.
        # Losses are computed in fp32 or fp64, even if the model computes in bf16 or fp16.
        logits = outputs.to(wide_dtype()).flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten(), reduction="sum")
        return {"loss": loss}

    def weight(self, targets: Any) -> int | Tensor:
        """Return what a micro-batch's losses are divided by; it may differ by micro-batch."""
        if self.description["end"] < 0:
            return targets.numel()
        return (targets != -100).sum()

    def metrics(self, outputs: Any, targets: Any) -> dict[str, Tensor]:
        """Return metrics of each sample, by name: tensors whose first dimension is the batch."""
        logits = outputs.to(wide_dtype()).flatten(0, 1)
        losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
        losses = losses.view_as(targets)
        return {"loss": losses.sum(dim=1), "count": (targets != -100).sum(dim=1)}

    def aggregate(self, metrics: dict[str, np.ndarray]) -> dict[str, Any]:
        """Return the metrics of a set from those of its samples; ``loss`` is in nats per token."""
        # A sum in float32 would be too coarse where a set is large.
        total = metrics["loss"].sum(dtype=np.float64)
        loss = total / metrics["count"].sum()
        bits_per_byte = loss / np.log(2) / self.description["bytes_per_token"]
        return {
            "loss": loss,
            "bits_per_byte": bits_per_byte,
            "perplexity": np.exp(loss),
        }

    def throughput(self, samples_per_second: float) -> dict[str, float]:
        """Return more numbers for the log; ``mfu`` is the used share of the devices' bf16 peak."""
        tokens_per_second = samples_per_second * self.context
        numbers = {"tokens_per_second": tokens_per_second}
        if self.peak_per_rank > 0:
            peak = self.peak_per_rank * dist.get_world_size()
            numbers["mfu"] = tokens_per_second * self.operations_per_token / peak
        return numbers


def count_operations(config: Config) -> int:
    """Return the operations of a step per token (Chowdhery et al. 2022, PaLM, appendix B)."""
    model = config.model
    multiplied = 0
    with torch.device("meta"):
        parameters = build_model(model).named_parameters()
    for name, parameter in parameters:
        if not name.startswith("embedding"):  # Embeddings are looked up instead of multiplied.
            multiplied += parameter.numel()
    # A parameter takes 2 operations in forward and 4 in backward; the other term is attention.
    return 6 * multiplied + 12 * model.layers * model.width * model.context
