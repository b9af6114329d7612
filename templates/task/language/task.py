"""What is learned and measured: the losses, what they are a mean over, and the metrics."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from .config import Config
from .dataset import describe
from .model import build_model

# 10^12 operations per second in bf16 without sparsity, from NVIDIA's data sheets.
PEAKS = {"NVIDIA A100-SXM4-80GB": 312.0, "NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H200": 989.4}


class Task:
    """The losses and metrics of an experiment; each rank builds one, and so does the plain loop of the tests."""

    best_metric, higher_is_better = "bits_per_byte", False  # They select the best checkpoint.

    def __init__(self, config: Config, device: torch.device) -> None:
        """Load what the losses need, such as a teacher: modules are frozen, in eval mode, on ``device``."""
        self.context, self.operations = config.model.context, count_operations(config)
        self.about = describe(config.dataset.path)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self.peak = 1e12 * PEAKS.get(name, 0.0) * getattr(config.parallel, "devices", 1)

    def prepare(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return a local batch with what is computed once for it, such as a teacher's outputs, without gradients."""
        return inputs, targets

    def losses(self, outputs: Any, targets: Any) -> dict[str, Tensor]:
        """Return sums over a micro-batch, by name, of (batch, time, vocabulary) logits; ``loss`` is minimized."""
        return {"loss": F.cross_entropy(outputs.float().flatten(0, 1), targets.flatten(), reduction="sum")}

    def weight(self, targets: Any) -> int | Tensor:
        """Return what losses are divided by for their mean: the number of targets, a tensor if local batches differ."""
        return targets.numel() if self.about["end"] < 0 else (targets != -100).sum()

    def metrics(self, outputs: Any, targets: Any) -> dict[str, Tensor]:
        """Return the metrics of each sample of a batch, by name: tensors whose first dimension is the batch."""
        losses = F.cross_entropy(outputs.float().flatten(0, 1), targets.flatten(), reduction="none")
        return {"loss": losses.view_as(targets).sum(dim=1), "count": (targets != -100).sum(dim=1)}

    def aggregate(self, metrics: dict[str, np.ndarray]) -> dict[str, Any]:
        """Return the metrics of a split, from those of its samples: ``loss`` is in nats per token."""
        loss = metrics["loss"].sum(dtype=np.float64) / metrics["count"].sum()
        bits_per_byte = loss / np.log(2) / self.about["bytes_per_token"]
        return {"loss": loss, "bits_per_byte": bits_per_byte, "perplexity": np.exp(loss)}

    def throughput(self, samples_per_second: float) -> dict[str, float]:
        """Return the speed that a record also has; ``mfu`` is the share of the devices' peak in bf16 that is used."""
        tokens = samples_per_second * self.context
        mfu = {"mfu": tokens * self.operations / dist.get_world_size() / self.peak} if self.peak else {}
        return {"tokens_per_second": tokens, **mfu}


def count_operations(config: Config) -> int:
    """Return the operations of forward and backward per token (Chowdhery et al. 2022, PaLM, appendix B)."""
    with torch.device("meta"):
        parameters = build_model(model := config.model).named_parameters()
    multiplied = sum(p.numel() for name, p in parameters if not name.startswith("embedding"))  # They are looked up.
    return 6 * multiplied + 12 * model.layers * model.width * model.context
