"""The data: consecutive windows of a text, read as bytes, each with the byte that follows every one of them."""

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from .config import Config, DatasetConfig, UserError

# Makes a batch, a pair (inputs, targets), of a list of samples.
collate_fn = default_collate


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive windows of a split of the text as ``(bytes, the byte after each)``, int64 of shape (context,)."""

    def __init__(self, split: str, config: Config) -> None:
        self.arguments, self.context = (split, config), config.model.context
        text = read_text(config.dataset)
        middle = max(0, len(text) - config.dataset.test_bytes)
        self.text = text[:middle] if split == "train" else text[middle:]
        if len(self) < 1:
            counts = f"{len(self.text)} of {len(text)} bytes of text, less than a sample of {self.context + 1}"
            raise UserError(f"the {split} set has {counts}; change dataset.test_bytes, or give a longer text")

    def __reduce__(self) -> tuple[Any, ...]:
        return Windows, self.arguments  # A loader process reads the text itself.

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        window = torch.from_numpy(self.text[start : start + self.context + 1].astype(np.int64))
        return window[:-1], window[1:]


def build_datasets(config: Config) -> tuple[Windows, Windows]:
    """Return the training set and the test set."""
    return Windows("train", config), Windows("test", config)


def read_text(config: DatasetConfig) -> np.ndarray:
    """Return the bytes of the text; a file is memory-mapped, so that all processes share its pages."""
    if config.path is not None:
        return np.memmap(config.path, np.uint8, mode="r")[: config.max_bytes]
    # By the end of their names, so that both splits have files of all kinds.
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: path.name[::-1])
    return np.frombuffer(b"".join(path.read_bytes() for path in files)[: config.max_bytes], np.uint8)
