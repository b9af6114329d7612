"""Random numbers and arithmetic: what makes a run reproducible."""

import os
import random
from typing import Any

import numpy as np
import torch


def set_exact_arithmetic(exact: bool) -> None:
    """Choose whether GPUs compute in full fp32 with deterministic algorithms, in training and evaluation alike.

    If so, an operation without such an algorithm raises RuntimeError; warnings alone would leave attention as it is.
    Called before the first use of CUDA and of the compiler, which read their variables then.
    """
    if exact:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
    # Not fp32_precision: once that is set, whoever reads allow_tf32, as torch.backends.cudnn.flags does, gets an error.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not exact
    torch.backends.cudnn.deterministic = exact
    # Does what torch.use_deterministic_algorithms does, which would also import the compiler, in seconds.
    torch.set_deterministic_debug_mode("error" if exact else "default")
    # This finds mistakes, and takes time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def seed_rank(seed: int, rank: int) -> None:
    """Seed each rank differently, for what may differ between ranks, such as dropout.

    Initial weights are drawn before this call, from the same seed on every rank; augmentation is seeded per sample.
    """
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)


def get_rng_state(device: torch.device) -> dict[str, Any]:
    """Return the state of this rank's random number generators, in types that a checkpoint may hold."""
    numpy_state: Any = np.random.get_state()
    name, keys, *rest = numpy_state
    state = {"python": random.getstate(), "numpy": (name, keys.tolist(), *rest), "torch": torch.get_rng_state()}
    if device.type != "cpu":
        state["accelerator"] = torch.get_device_module(device).get_rng_state()
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore what ``get_rng_state`` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type != "cpu" and "accelerator" in state:
        torch.get_device_module(device).set_rng_state(state["accelerator"])
