"""The data: consecutive windows of a text or of tokens, each with the tokens that follow."""

import json
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from .config import Config, DatasetConfig, UserError

collate_fn = default_collate  # It makes a batch of a list of samples: a pair (inputs, targets).


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a split, int64 of shape (context,), each with the tokens that follow."""

    def __init__(self, split: str, config: Config) -> None:
        self.arguments = (split, config)
        self.context = config.model.context
        self.end = describe(config.dataset.path)["end"]
        tokens = read_tokens(config.dataset)
        test_size = config.dataset.test_bytes
        splits = {
            "train": tokens[: -2 * test_size],
            "validation": tokens[-2 * test_size : -test_size],
            "test": tokens[-test_size:],
        }
        self.tokens = splits[split]
        if len(self) == 0:
            raise UserError(
                f"{len(tokens)} tokens leave no window for the {split} set; "
                "change dataset.test_bytes"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle would send all tokens to each loader process; this lets the process read them.
        return Windows, self.arguments

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.context  # The last target is one token more.

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        tokens = self.tokens[start : start + self.context + 1]
        window = torch.from_numpy(tokens.astype(np.int64))
        # A document does not tell how the next one begins: F.cross_entropy ignores the target -100.
        is_end = window[:-1] == self.end
        targets = window[1:].masked_fill(is_end, -100)
        return window[:-1], targets


def build_datasets(config: Config) -> tuple[Windows, Windows, Windows]:
    """Return the sets for training, validation and test, the same on all ranks."""
    config.model.vocabulary = describe(config.dataset.path)["vocabulary"]
    train_set = Windows("train", config)
    return train_set, Windows("validation", config), Windows("test", config)


def describe(path: str | None) -> dict[str, Any]:
    """Return what scripts/prepare.py wrote about tokens; any other file is a text of bytes."""
    if path is None or not path.endswith(".bin"):
        return {
            "dtype": "uint8",
            "vocabulary": 256,
            "end": -1,  # No token ends a document.
            "bytes_per_token": 1,
            "tokenizer": None,
        }
    file = Path(path).with_suffix(".json")
    if not file.exists():
        raise UserError(f"{path} has no {file} with it; scripts/prepare.py writes both")
    description = json.loads(file.read_text())
    if description["tokenizer"]:
        # The tokenizer lies in the folder of its description, wherever that was moved to.
        description["tokenizer"] = str(file.with_name(description["tokenizer"]))
    return description


def read_tokens(config: DatasetConfig) -> np.ndarray:
    """Return the tokens of the file, or of Python's standard library."""
    if config.path is not None:
        dtype = describe(config.path)["dtype"]
        tokens = np.memmap(config.path, dtype, mode="r")
        return tokens[: config.max_bytes]
    library = Path(sysconfig.get_path("stdlib"))
    # Files are sorted by their reversed names, so that similar ones are spread over all splits.
    files = sorted(library.glob("*.py"), key=lambda path: path.name[::-1])
    text = b"".join(path.read_bytes() for path in files)
    max_bytes = config.max_bytes or 4_000_000
    return np.frombuffer(text[:max_bytes], np.uint8)
