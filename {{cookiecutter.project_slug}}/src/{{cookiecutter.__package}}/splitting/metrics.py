"""Metrics of samples, which the ranks computed: merged in the order of the dataset, each sample once."""

import sys
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from ..config import UserError

Metrics = dict[str, np.ndarray]  # Per sample: arrays by name, whose first dimension is the samples.


def concatenate(name: str, values: list[Tensor], length: int) -> np.ndarray:
    """Return the values of one metric as one array; reject another ``length``, and rows whose shapes differ."""
    if len({value.shape[1:] for value in values}) > 1 or sum(map(len, values)) != length:
        raise UserError(f"per_sample_metrics returned a {name} that is not one number, or row of a shape, per sample")
    return torch.cat(values).cpu().numpy()


def merge(shares: list[Metrics], length: int) -> Metrics:
    """Merge the ranks' metrics in the order of the dataset, so that sums over it do not depend on the split.

    Rank 0 warns of samples whose metrics are not finite, as those of the whole dataset then are not, either.

    Raises:
        RuntimeError: if one of ``length`` samples is missing or was counted twice.
    """
    index = np.concatenate([share["index"] for share in shares])
    if len(index) != length or len(np.unique(index)) != length:
        raise RuntimeError(f"{len(np.unique(index))} of {length} samples were evaluated, {len(index)} times in all")
    order = np.argsort(index)
    names = next(share.keys() for share in shares if len(share["index"]))
    merged = {name: np.concatenate([share[name] for share in shares if len(share["index"])])[order] for name in names}
    if not dist.is_initialized() or dist.get_rank() == 0:
        warn_of_nonfinite(merged)
    return merged


def warn_of_nonfinite(metrics: Metrics) -> None:
    """Print which samples have a metric that is not finite."""
    for name, values in metrics.items():
        bad = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1)).tolist()
        if bad:
            tqdm.write(f"warning: {name} of test sample {name_some(bad)} is not finite", file=sys.stderr)


def name_some(names: Sequence[object], most: int = 5) -> str:
    """Return the first names as a text, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more
