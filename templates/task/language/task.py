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

# NVIDIA's data sheets give these 10^12 operations per second, in bf16 without sparsity.
PEAKS = {"NVIDIA A100-SXM4-80GB": 312.0, "NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H200": 989.4}


class Task:
    """The losses and metrics of the experiment; each rank builds one.

    The plain loop of the tests builds one too, so the tests check the losses that you write here.
    """

    # The best checkpoint is chosen by this metric of the validation set.
    best_metric = "bits_per_byte"
    higher_is_better = False

    def __init__(self, config: Config, device: torch.device) -> None:
        """Build what the losses need, such as a teacher.

        Modules among the attributes are then moved to ``device``, frozen and put into eval mode.
        """
        self.context = config.model.context
        self.description = describe(config.dataset.path)
        self.operations_per_token = count_operations(config)
        # A device that PEAKS does not name has no known peak, so mfu is not logged.
        self.peak_operations_per_second = 0.0
        if device.type == "cuda":
            # Under some strategies, a rank has several devices.
            devices = getattr(config.parallel, "devices", 1)
            peak = PEAKS.get(torch.cuda.get_device_name(device), 0.0)
            self.peak_operations_per_second = 1e12 * peak * devices

    def prepare(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return a local batch with what is computed once for it, such as a teacher's outputs.

        Results have no gradients, and tensors have the samples as their first dimension.
        """
        return inputs, targets

    def losses(self, outputs: Any, targets: Any) -> dict[str, Tensor]:
        """Return sums over the tokens of a micro-batch, by name.

        ``loss`` is minimized; all of them are logged, divided by ``weight``.

        Args:
            outputs: Logits of shape (batch, time, vocabulary), in the type of the computation.
            targets: Tokens of shape (batch, time), or -100 where there is no target.
        """
        # Losses are computed in fp32, even if the model computes in bf16 or fp16.
        logits = outputs.float().flatten(0, 1)
        return {"loss": F.cross_entropy(logits, targets.flatten(), reduction="sum")}

    def weight(self, targets: Any) -> int | Tensor:
        """Return what the losses of a local batch are divided by: its number of targets.

        If local batches can differ in it, it is a tensor: only a tensor is averaged over the ranks.
        """
        if self.description["end"] < 0:
            # There are no documents, so every position has a target.
            return targets.numel()
        return (targets != -100).sum()

    def metrics(self, outputs: Any, targets: Any) -> dict[str, Tensor]:
        """Return metrics of each sample, by name: tensors whose first dimension is the batch."""
        logits = outputs.float().flatten(0, 1)
        losses = F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets)
        return {"loss": losses.sum(dim=1), "count": (targets != -100).sum(dim=1)}

    def aggregate(self, metrics: dict[str, np.ndarray]) -> dict[str, Any]:
        """Return the metrics of a whole set; ``loss`` is in nats per token.

        Args:
            metrics: What ``metrics`` returned, of all samples in the order of the dataset.
        """
        # A sum in float32 would be too coarse where a set is large.
        loss = metrics["loss"].sum(dtype=np.float64) / metrics["count"].sum()
        bits_per_byte = loss / np.log(2) / self.description["bytes_per_token"]
        return {"loss": loss, "bits_per_byte": bits_per_byte, "perplexity": np.exp(loss)}

    def throughput(self, samples_per_second: float) -> dict[str, float]:
        """Return further numbers on speed for the log.

        ``mfu``, model FLOPs utilization, is the share of the devices' peak in bf16 that is used.
        """
        tokens_per_second = samples_per_second * self.context
        numbers = {"tokens_per_second": tokens_per_second}
        if self.peak_operations_per_second > 0:
            operations_per_second = tokens_per_second * self.operations_per_token
            per_rank = operations_per_second / dist.get_world_size()
            numbers["mfu"] = per_rank / self.peak_operations_per_second
        return numbers


def count_operations(config: Config) -> int:
    """Return the operations of a step per token (Chowdhery et al. 2022, PaLM, appendix B)."""
    model = config.model
    multiplied = 0
    # On the meta device, parameters have shapes, but take no memory.
    with torch.device("meta"):
        parameters = build_model(model).named_parameters()
    for name, parameter in parameters:
        # Embeddings are looked up instead of multiplied.
        if not name.startswith("embedding"):
            multiplied += parameter.numel()
    # A parameter takes a multiplication and an addition in forward, and twice as many in backward.
    # The other term is attention.
    return 6 * multiplied + 12 * model.layers * model.width * model.context
