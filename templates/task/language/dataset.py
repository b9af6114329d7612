"""The data: consecutive windows of a text or of tokens, each with the token that follows every one of its own."""

import json
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from .config import Config, DatasetConfig, UserError

collate_fn = default_collate  # Makes a batch, a pair (inputs, targets), of a list of samples.


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows ``(tokens, the token after each)``, int64 of shape (context,); -100 follows the end of a document."""

    def __init__(self, split: str, config: Config) -> None:
        self.arguments, self.context, size = (split, config), config.model.context, config.dataset.test_bytes
        self.end, tokens = describe(config.dataset.path)["end"], read_tokens(config.dataset)
        parts = {"train": slice(-2 * size), "validation": slice(-2 * size, -size), "test": slice(-size, None)}
        self.tokens = tokens[parts[split]]
        if len(self) < 1:
            raise UserError(f"{len(tokens)} tokens leave no window for the {split} set; change dataset.test_bytes")

    def __reduce__(self) -> tuple[Any, ...]:
        return Windows, self.arguments  # A loader process reads the text itself.

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        window = torch.from_numpy(self.tokens[start : start + self.context + 1].astype(np.int64))
        return window[:-1], window[1:].masked_fill(window[:-1] == self.end, -100)


def build_datasets(config: Config) -> tuple[Windows, Windows, Windows]:
    """Return the sets for training, validation and test, the same on all ranks; the model gets their vocabulary."""
    config.model.vocabulary = describe(config.dataset.path)["vocabulary"]
    return Windows("train", config), Windows("validation", config), Windows("test", config)


def describe(path: str | None) -> dict[str, Any]:
    """Return what the tokens of a file are, as scripts/prepare.py describes them."""
    if path is None or not path.endswith(".bin"):
        return {"dtype": "uint8", "vocabulary": 256, "end": -1, "bytes_per_token": 1, "tokenizer": None}  # Bytes.
    if not (description := Path(path).with_suffix(".json")).exists():
        raise UserError(f"{path} has no {description} with it; scripts/prepare.py writes both")
    about = dict(json.loads(description.read_text()))
    return about | {"tokenizer": about["tokenizer"] and str(description.with_name(about["tokenizer"]))}


def read_tokens(config: DatasetConfig) -> np.ndarray:
    """Return the tokens; a file is memory-mapped, so that all processes share its pages."""
    if config.path is not None:
        return np.memmap(config.path, describe(config.path)["dtype"], mode="r")[: config.max_bytes]
    # By the end of their names, so that both splits have files of all kinds.
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: path.name[::-1])
    return np.frombuffer(b"".join(path.read_bytes() for path in files)[: config.max_bytes or 4_000_000], np.uint8)
