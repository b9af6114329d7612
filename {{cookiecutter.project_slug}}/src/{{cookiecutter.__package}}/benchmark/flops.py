"""Floating-point operations (FLOPs) of a step, and which share that is of what the devices could do meanwhile.

A matrix product of (n, k) and (k, m) takes 2nkm of them. Only products, convolutions and attention count, once in
forward and twice in backward, as the model defines them: neither what is recomputed nor what is computed on several
ranks counts again, so that the share is the same measure for every way to split the work (PaLM, Chowdhery et al. 2022,
appendix B: model FLOPs utilization, MFU).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from .steps import Steps

# 10^12 FLOPs per second without sparsity, from NVIDIA's data sheets: fp32, TF32 (fp32 without it), bf16 or fp16.
PEAKS = {
    "Tesla T4": (8.1, 8.1, 65.0),
    "Tesla V100-SXM2-16GB": (15.7, 15.7, 125.0),
    "Tesla V100-SXM2-32GB": (15.7, 15.7, 125.0),
    "NVIDIA L4": (30.3, 60.5, 121.0),
    "NVIDIA L40S": (91.6, 183.0, 362.0),
    "NVIDIA A100-SXM4-40GB": (19.5, 156.0, 312.0),
    "NVIDIA A100-SXM4-80GB": (19.5, 156.0, 312.0),
    "NVIDIA A100-PCIE-40GB": (19.5, 156.0, 312.0),
    "NVIDIA A100 80GB PCIe": (19.5, 156.0, 312.0),
    "NVIDIA H100 PCIe": (51.2, 378.0, 756.0),
    "NVIDIA H100 80GB HBM3": (66.9, 494.7, 989.4),
    "NVIDIA H200": (66.9, 494.7, 989.4),
}


def rate_flops(build_model: Callable[[], nn.Module], steps: Steps, samples_per_second: float) -> dict[str, Any]:
    """Return what a step takes, what was reached per second over all ranks, and as a share of the peak (None: unknown).

    All batches have the shapes of the last one.
    """
    trainer = steps.trainer
    batch = trainer.config.data.global_batch_size
    flops = count_flops(build_model, steps.inputs)
    if flops is None:
        return {"flops_per_step": None, "flops_per_second": None, "mfu": None}
    flops *= trainer.parallel.dp_size
    reached = flops * samples_per_second / batch
    devices = trainer.process.world_size * trainer.config.parallel.devices_per_rank()
    peak = find_peak(trainer.process.device, trainer.config.train.precision, trainer.config.train.exact)
    mfu = None if peak is None else round(reached / (devices * peak), 4)
    return {"flops_per_step": flops, "flops_per_second": round(reached), "mfu": mfu}


def count_flops(build_model: Callable[[], nn.Module], inputs: Any) -> int | None:
    """Return the FLOPs of forward and backward for inputs of these shapes, or None if they depend on values.

    Computes nothing: on the meta device, tensors have shapes alone.
    """
    inputs = tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), inputs)
    try:
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            outputs = [part for part in tree_leaves(build_model()(inputs)) if isinstance(part, Tensor)]
            torch.autograd.backward([part.sum() for part in outputs if part.requires_grad])
    except (NotImplementedError, RuntimeError):  # The model reads a value, or uses an operation without shapes.
        return None
    return int(counter.get_total_flops())


def find_peak(device: torch.device, precision: str, exact: bool) -> float | None:
    """Return the FLOPs per second that a device could do in this precision, if its data sheet is known here."""
    if device.type != "cuda" or torch.cuda.get_device_name(device) not in PEAKS:
        return None
    fp32, tf32, half = PEAKS[torch.cuda.get_device_name(device)]
    return 1e12 * (half if precision != "fp32" else fp32 if exact else tf32)
