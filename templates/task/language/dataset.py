"""The data: a text as bytes, and what a batch of its windows means (loss, scores, figures).

The text is memory-mapped: every process of a machine reads the same pages, and its size costs no memory.
"""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from .config import Config, DatasetConfig, UserError

# What is no part of the standard library's own code; and tables that programs wrote: one, unlike all other text, could
# fill the test split.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
LEFT_OUT |= {"encodings", "entities.py", "msilib", "pydoc_data"}

# The figure by which the best checkpoint is chosen, and whether more of it is better.
BEST_BY, HIGHER_IS_BETTER = "bits_per_byte", False


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """A part of a text in windows, side by side, as ``(bytes, the byte after each)``: int64 of shape (context,) both.

    Args:
        path: File of the text.
        start: First byte of the part.
        stop: The byte after its last.
        context: Bytes in a window.
    """

    def __init__(self, path: Path, start: int, stop: int, context: int) -> None:
        self.arguments = path, start, stop, context
        self.text = np.memmap(path, np.uint8, mode="r", offset=start, shape=(stop - start,))
        self.context = context

    def __reduce__(self) -> tuple[Any, ...]:
        # A loader process maps the file itself; pickled, the map would travel as a copy of the whole text.
        return Windows, self.arguments

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """The window ``index``, which is the same in every epoch."""
        _, index = key
        start = index * self.context
        window = torch.from_numpy(self.text[start : start + self.context + 1].astype(np.int64))
        return window[:-1], window[1:]


def build_datasets(config: Config) -> tuple[Windows, Windows]:
    """The training set, and the test set: the end of the text.

    Raises:
        UserError: if there is no text, or too little for one window of each.
    """
    path, context = find_text(config.dataset), config.model.context
    size = path.stat().st_size
    end = min(size, config.dataset.max_bytes or size)
    middle = end - config.dataset.test_bytes
    if min(middle, end - middle) <= context:
        raise UserError(
            f"dataset.path is {config.dataset.path}, of which {end} bytes are used: dataset.test_bytes "
            f"({config.dataset.test_bytes}) and what is left to train on each have to be more than model.context "
            f"({context}); give a longer text, or lower one of them"
        )
    return Windows(path, 0, middle, context), Windows(path, middle, end, context)


def find_text(config: DatasetConfig) -> Path:
    """The file of the text: the one that was asked for, or one that joins those of a folder.

    Raises:
        UserError: if there is no text, or the joined text cannot be written.
    """
    if config.path == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = [path for path in root.rglob("*.py") if LEFT_OUT.isdisjoint(path.relative_to(root).parts)]
    elif (root := Path(config.path)).is_dir():
        files = [path for path in root.rglob("*") if path.is_file() and is_text(path, root)]
    else:
        return root
    try:
        return join(files, root, config)
    except OSError as error:
        raise UserError(f"the files of {root} could not be joined in dataset.cache: {error}") from None


def is_text(path: Path, root: Path) -> bool:
    """Whether a file is neither hidden nor binary, by the rule of git: no zero byte among its first 8,000."""
    if any(part.startswith(".") for part in path.relative_to(root).parts):
        return False
    with open(path, "rb") as file:
        return b"\0" not in file.read(8000)


def join(files: Sequence[Path], root: Path, config: DatasetConfig) -> Path:
    """Join files to one of ``max_bytes`` in the cache, unless it is there; several processes may do so at once.

    They stand in the order of a hash of their names, so that training and test split hold text of the same kinds.
    """

    def rank(path: Path) -> bytes:
        return hashlib.sha256(path.relative_to(root).as_posix().encode(errors="surrogateescape")).digest()

    files = sorted(files, key=rank)
    states = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    digest = hashlib.sha256(repr((states, config.max_bytes)).encode(errors="surrogateescape")).hexdigest()
    target = Path(config.cache) / f"{digest[:16]}.txt"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    left = config.max_bytes or sum(size for _, size, _ in states)
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as joined:
        for path in files:
            with open(path, "rb") as file:
                left -= joined.write(file.read(left))
            if not left:
                break
    os.replace(joined.name, target)
    return target


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of (batch, time, 256) logits for (batch, time) bytes, in nats a byte."""
    return F.cross_entropy(outputs.float().flatten(0, 1), targets.flatten())


def score(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """What evaluation keeps of a batch: one value a sample and name, each of shape (batch,)."""
    losses = F.cross_entropy(outputs.float().flatten(0, 1), targets.flatten(), reduction="none")
    return {"loss": losses.view_as(targets).mean(dim=1)}


def figures(scores: dict[str, np.ndarray]) -> dict[str, float]:
    """The figures of a whole split from the scores of all its samples, each of shape (samples,).

    Returns:
        ``loss`` (mean cross-entropy in nats a byte: all windows are equally long), the same as ``bits_per_byte``, and
        ``perplexity``, its exponential.
    """
    loss = float(scores["loss"].mean(dtype=np.float64))
    return {"loss": loss, "bits_per_byte": loss / math.log(2), "perplexity": float(np.exp(loss))}
