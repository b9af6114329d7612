"""What the ranks computed for their samples, put together so that it does not show how they were split."""

import numpy as np

Metrics = dict[str, np.ndarray]  # Per sample: arrays by name, whose first dimension is the samples.


def merge(shares: list[Metrics], length: int) -> Metrics:
    """Merge the ranks' metrics in the order of the dataset, so that sums over it do not depend on the split.

    Raises:
        RuntimeError: if one of ``length`` samples is missing or was counted twice.
    """
    index = np.concatenate([share["index"] for share in shares])
    if len(index) != length or len(np.unique(index)) != length:
        raise RuntimeError(f"{len(np.unique(index))} of {length} samples were evaluated, {len(index)} times in all")
    order = np.argsort(index)
    names = next(share.keys() for share in shares if len(share["index"]))
    return {name: np.concatenate([share[name] for share in shares if len(share["index"])])[order] for name in names}
