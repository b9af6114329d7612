"""The data, its loss and its metrics: windows of a text, read as bytes.

The text is memory-mapped: all processes on a machine share its pages, so a large text does not fill memory.

    text       "def main(): ..."                        (with a context of 5)
    sample 0   inputs "def m"    targets "ef ma"
    sample 1   inputs "ain()"    targets "in():"
"""

import hashlib
import math
import os
import sysconfig
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, default_collate

from .config import Config, DatasetConfig, UserError
from .reporting import Examples, continue_prompts
from .runtime import write_atomically

# Folders that are not the standard library's own code; then generated tables, one of which could fill the test split
# with text unlike the rest.
EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
EXCLUDED |= {"encodings", "entities.py", "msilib", "pydoc_data"}

SAMPLES, SAMPLE_BYTES = 3, 128  # Texts that the model writes at the end of a run, and their length.

# The metric that selects the best checkpoint, and whether higher is better.
BEST_METRIC, HIGHER_IS_BETTER = "bits_per_byte", False

# Units of the curves of the loss and that metric, whose name is its unit.
UNITS = {"loss": "nats per byte"}

# Makes a batch, a pair (inputs, targets), of a list of samples.
collate_fn = default_collate


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive windows of a part of a text as ``(bytes, the byte after each)``, both int64 of shape (context,).

    Args:
        path: File of the text.
        start: First byte of the part.
        stop: End of the part, exclusive.
        context: Bytes per window.

    Attributes:
        tokens_per_sample: The same; records then have the tokens per second as well.
    """

    def __init__(self, path: Path, start: int, stop: int, context: int) -> None:
        self.arguments = path, start, stop, context
        self.text = np.memmap(path, np.uint8, mode="r", offset=start, shape=(stop - start,))
        self.context = self.tokens_per_sample = context

    def __reduce__(self) -> tuple[Any, ...]:
        # A loader process maps the file itself; pickling the map would copy the whole text.
        return Windows, self.arguments

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return window ``index``."""
        start = index * self.context
        window = torch.from_numpy(self.text[start : start + self.context + 1].astype(np.int64))
        return window[:-1], window[1:]


def build_datasets(config: Config) -> tuple[Windows, Windows]:
    """Return the training set and the test set (the end of the text); rejects a text too short for a window of each."""
    path, context = find_text(config.dataset), config.model.context
    size = path.stat().st_size
    end = min(size, config.dataset.max_bytes or size)
    middle = end - config.dataset.test_bytes
    if min(middle, end - middle) <= context:
        raise UserError(
            f"dataset.path is {config.dataset.path}, of which {end} bytes are used: dataset.test_bytes "
            f"({config.dataset.test_bytes}) and the rest, for training, each have to be more than model.context "
            f"({context}); give a longer text, or lower one of them"
        )
    return Windows(path, 0, middle, context), Windows(path, middle, end, context)


def find_text(config: DatasetConfig) -> Path:
    """Return the path of the text file; for a folder, of a file that concatenates the folder's text files."""
    if config.path == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = [path for path in root.rglob("*.py") if EXCLUDED.isdisjoint(path.relative_to(root).parts)]
    elif (root := Path(config.path)).is_dir():
        files = [path for path in root.rglob("*") if path.is_file() and is_text(path, root)]
    else:
        return root
    try:
        return concatenate(files, root, config)
    except OSError as error:
        raise UserError(f"the files of {root} could not be concatenated in dataset.cache: {error}") from None


def is_text(path: Path, root: Path) -> bool:
    """Return whether a file is neither hidden nor binary; as in git, text has no zero byte in its first 8,000."""
    if any(part.startswith(".") for part in path.relative_to(root).parts):
        return False
    with open(path, "rb") as file:
        return b"\0" not in file.read(8000)


def concatenate(files: Sequence[Path], root: Path, config: DatasetConfig) -> Path:
    """Concatenate files into one of ``max_bytes`` in the cache, unless it exists; safe in concurrent processes.

    Files are ordered by a hash of their names, so that the training and test splits hold the same kinds of text.
    """

    def sort_key(path: Path) -> bytes:
        return hashlib.sha256(path.relative_to(root).as_posix().encode(errors="surrogateescape")).digest()

    files = sorted(files, key=sort_key)
    states = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    digest = hashlib.sha256(repr((states, config.max_bytes)).encode(errors="surrogateescape")).hexdigest()
    target = Path(config.cache) / f"{digest[:16]}.txt"
    if not target.exists():
        limit = config.max_bytes or sum(size for _, size, _ in states)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:  # Other processes may write the same.
            whole = Path(folder, target.name)
            write_atomically(whole, partial(write_text, files, limit))
            os.replace(whole, target)
    return target


def write_text(files: Sequence[Path], limit: int, output: BinaryIO) -> None:
    """Write the content of files, one after another, to ``output``: ``limit`` bytes in all."""
    for path in files:
        with open(path, "rb") as file:
            limit -= output.write(file.read(limit))
        if not limit:
            break


def loss_fn(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """Return the sum of the cross-entropy of (batch, time, 256) logits for (batch, time) bytes, in nats, and the bytes.

    The loss of a step is the sum over the global batch, divided by its weight. A weight that differs between batches,
    such as the bytes that are not padding, is returned as a tensor.
    """
    return F.cross_entropy(outputs.float().flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def per_sample_metrics(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return the per-sample metrics of a batch: tensors of shape (batch,) by name."""
    losses = F.cross_entropy(outputs.float().flatten(0, 1), targets.flatten(), reduction="none")
    return {"loss": losses.view_as(targets).mean(dim=1)}


def aggregate_metrics(samples: dict[str, np.ndarray]) -> dict[str, float]:
    """Aggregate the per-sample metrics of a whole split, which are arrays of shape (samples,) by name.

    Returns:
        ``loss`` (mean cross-entropy in nats per byte: all windows have the same length), the same as ``bits_per_byte``,
        and ``perplexity``, the exponential of the loss.
    """
    loss = float(samples["loss"].mean(dtype=np.float64))
    return {"loss": loss, "bits_per_byte": loss / math.log(2), "perplexity": float(np.exp(loss))}


def examples(evaluator: Any) -> Examples:
    """Return files that show what the model does, each with a function that makes it; optional, a collective."""
    test_set = evaluator.samples.dataset
    starts = [len(test_set) * part // SAMPLES for part in range(SAMPLES)]
    prompts = [bytes(test_set[start][0][: test_set.context // 2].tolist()) for start in starts]
    texts = continue_prompts(evaluator.parallel, prompts, SAMPLE_BYTES, test_set.context, guard=evaluator.guard)
    evaluator.parallel.module.train()
    headings = b"=== from the test set:\n", b"\n=== continued by the model:\n"
    parts = [headings[0] + prompt + headings[1] + text + b"\n" for prompt, text in zip(prompts, texts, strict=True)]
    return {"samples.txt": lambda: b"\n".join(parts).decode(errors="replace")}
