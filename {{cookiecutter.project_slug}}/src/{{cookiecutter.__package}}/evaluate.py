"""Exact evaluation: every sample is counted once, whatever the number of ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from . import checkpoint, dataset
from .checks import check
from .config import Config, ModelConfig
from .data import EvalSampler, build_loader
from .distributed import World, on_main
from .model import build_model
from .parallel import Parallel
from .state import average_buffers

Scores = dict[str, np.ndarray]


class Evaluator:
    """Scores a model on one dataset, again and again.

    Args:
        samples: A dataset whose items are ``(input, target)``.
        parallel: The model.
        config: The run's settings.
        around_batch: A context for each batch, the same number of times on every rank; may raise to give up.
    """

    def __init__(
        self,
        samples: Any,
        parallel: Parallel,
        config: Config,
        around_batch: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.parallel, self.around_batch = parallel, around_batch
        self.samples, self.length = samples, len(samples)
        self.sampler = EvalSampler(self.length, parallel.data_rank, parallel.data_size)
        self.loader = build_loader(
            samples, self.sampler, config.data.eval_batch_size, config.data, device=parallel.device
        )
        # Of all ranks, rank 0 has the most samples.
        self.most_batches = math.ceil(math.ceil(self.length / parallel.data_size) / config.data.eval_batch_size)

    def __call__(self) -> dict[str, Any]:
        """The figures of the whole dataset, the same on every rank; a collective.

        Returns:
            ``num_samples``, and what ``dataset.figures`` makes of their scores.

        Raises:
            RuntimeError: if a sample was left out.
        """
        average_buffers(self.parallel.module, self.parallel.data_size, self.parallel.data_group)
        self.parallel.module.eval()
        mine = self.score_my_share()
        self.parallel.module.train()
        # One message of a few arrays from each rank; samples are put in their place by index.
        shares: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shares, mine)
        scores = merge(shares, self.length)
        return {"num_samples": self.length, **dataset.figures(scores)}

    @torch.no_grad()
    def score_my_share(self) -> Scores:
        """The scores of the samples that this rank answers for, each of shape (samples,), and their ``index``."""
        scores: dict[str, list[Tensor]] = {}
        for inputs, targets in self.batches():
            with self.around_batch():
                outputs = self.parallel.predict(inputs.to(self.parallel.device, non_blocking=True))
                if outputs is None or targets is None:
                    continue
                targets = targets.to(self.parallel.device, non_blocking=True)
                for name, values in dataset.score(outputs, targets).items():
                    scores.setdefault(name, []).append(values)
        arrays = {name: torch.cat(values).cpu().numpy() for name, values in scores.items()}
        return {**arrays, "index": np.array(self.sampler.indices if arrays else [], dtype=np.int64)}

    def batches(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """This rank's batches, and then as many more as rank 0 has.

        The model may have to be run by all ranks together: one that has no samples left runs it on any, for nothing.
        """
        yield from self.loader
        for _ in range(self.most_batches - len(self.loader)):
            yield self.samples[0, 0][0][None], None


def merge(shares: list[Scores], length: int) -> Scores:
    """Put the ranks' scores in the order of the dataset, so that sums over it do not depend on how it was split.

    Args:
        shares: For each rank, arrays of shape (its samples,) by name, ``index`` among them.
        length: Samples in the dataset.

    Returns:
        Arrays of shape (length,) by name.

    Raises:
        RuntimeError: if a sample is missing or was scored twice.
    """
    index = np.concatenate([share["index"] for share in shares])
    if len(index) != length or len(np.unique(index)) != length:
        raise RuntimeError(f"{len(np.unique(index))} samples of {length} were scored, {len(index)} times in all")
    order = np.argsort(index)
    names = next(share.keys() for share in shares if len(share["index"]))
    return {name: np.concatenate([share[name] for share in shares if len(share["index"])])[order] for name in names}


def evaluate(path: str, config: Config, world: World) -> None:
    """Score the checkpoint at ``path`` on the test set and tell the figures.

    Raises:
        UserError: if it is no checkpoint of this project, or does not fit.
    """
    header, parallel = load(path, config, world)
    _, test_set = dataset.build_datasets(config)
    record = {"event": "eval", "step": header["progress"]["step"], "split": "test"}
    record |= Evaluator(test_set, parallel, config)()
    on_main(lambda: tell(record, config.run.dir), world)


def load(path: str, config: Config, world: World) -> tuple[dict[str, Any], Parallel]:
    """The small parts of the checkpoint at ``path``, and its model, spread over the ranks; a collective.

    The network is the one that was saved: the checkpoint's own ``model`` settings replace those of ``config``.
    """
    header, state = checkpoint.read_on_main(Path(path), world)
    config.model = ModelConfig(**header["config"]["model"])
    check(config, world.size, training=False)
    parallel = Parallel(build_model(config.model), dataset.loss_fn, config, world)
    checkpoint.load(Path(path), header, state, parallel)
    return header, parallel


def tell(record: dict[str, Any], folder: str) -> None:
    """Print a record as one line of JSON, and append it to ``folder``'s metrics, if a folder is given."""
    line = json.dumps(record)
    print(line)
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with open(Path(folder) / "metrics.jsonl", "a", encoding="utf-8") as metrics:
            metrics.write(line + "\n")
