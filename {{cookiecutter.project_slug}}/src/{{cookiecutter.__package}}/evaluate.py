"""Exact evaluation: every sample counts once, for any number of ranks."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from . import dataset
from .checkpoint import load_model, read_on_main, saved_section
from .config import Config, DataConfig, UserError
from .data import EvalSampler, build_loader, seed_dataset
from .launch import check_layout
from .model import build_model
from .parallel import Parallel
from .reporting import append_record
from .runtime import Process, all_gather_object, on_main
from .splitting import to_device, unpack
from .strategy import Strategy

Metrics = dict[str, np.ndarray]  # Per sample: arrays by name, whose first dimension is the samples.
Context = Callable[[], AbstractContextManager[None]]


class Evaluator:
    """Evaluates a model on a map-style dataset each time it is called; rejects a stream, whose samples have no index.

    ``guard`` returns a context manager for each batch, entered equally often on every rank; it may raise to stop.
    """

    def __init__(
        self, samples: Any, parallel: Strategy, config: DataConfig, seed: int, guard: Context = nullcontext
    ) -> None:
        if isinstance(samples, IterableDataset):
            raise UserError("the test set is an IterableDataset; give a list of its samples, so that each counts once")
        self.samples, self.parallel, self.guard = seed_dataset(samples, seed), parallel, guard
        self.sampler = EvalSampler(len(samples), parallel.dp_rank, parallel.dp_size)
        self.loader = build_loader(self.samples, self.sampler, config.eval_batch_size, config, parallel.device)
        # Rank 0 has at least as many samples as any other rank.
        self.most_batches = math.ceil(math.ceil(len(samples) / parallel.dp_size) / config.eval_batch_size)

    def __call__(self) -> dict[str, Any]:
        """Return ``num_samples`` and ``dataset.aggregate_metrics``, the same on every rank; a collective."""
        self.parallel.average_buffers()
        self.parallel.module.eval()
        own = self.evaluate_share()
        self.parallel.module.train()
        # One message of a few arrays per rank; samples are put in order by their index.
        metrics = merge(all_gather_object(own), len(self.samples))
        return {"num_samples": len(self.samples), **dataset.aggregate_metrics(metrics)}

    @torch.no_grad()
    def evaluate_share(self) -> Metrics:
        """Return the metrics of the samples whose outputs this rank has, and their ``index``."""
        collected: dict[str, list[Tensor]] = {}
        device = self.parallel.device
        for batch, counts in self.batches():
            with self.guard():
                inputs, targets = unpack(batch)
                outputs = self.parallel.predict(to_device(inputs, device))
                if outputs is None or not counts:
                    continue
                for name, values in dataset.per_sample_metrics(outputs, to_device(targets, device)).items():
                    collected.setdefault(name, []).append(values)
        arrays = {name: concatenate(name, values) for name, values in collected.items()}
        return {**arrays, "index": np.array(self.sampler.indices if arrays else [], dtype=np.int64)}

    def batches(self) -> Iterator[tuple[Any, bool]]:
        """Yield this rank's batches, then dummy batches that do not count, up to rank 0's number of batches.

        A rank without samples still runs the model, so that the model's collectives match.
        """
        yield from ((batch, True) for batch in self.loader)
        for _ in range(self.most_batches - len(self.loader)):
            yield self.samples.__getitems__([(0, 0)]), False


def concatenate(name: str, values: list[Tensor]) -> np.ndarray:
    """Return the values of one metric as one array; reject rows whose shape differs between batches."""
    if len({value.shape[1:] for value in values}) > 1:
        raise UserError(f"per_sample_metrics returned a {name} whose rows differ in shape; return a number for each")
    return torch.cat(values).cpu().numpy()


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


def evaluate(path: str, config: Config, process: Process) -> None:
    """Evaluate the checkpoint at ``path`` on the test set and print its metrics."""
    header, parallel = load_strategy(path, config, process)
    _, test_set = dataset.build_datasets(config)
    record = {"event": "eval", "step": header["progress"]["step"], "split": "test"}
    record |= Evaluator(test_set, parallel, config.data, config.run.seed)()
    on_main(lambda: append_record(record, config.run.dir))


def load_strategy(path: str, config: Config, process: Process) -> tuple[dict[str, Any], Strategy]:
    """Load the checkpoint at ``path``; returns its header, and its model under this project's strategy. A collective.

    The model is the one that was saved: the checkpoint's ``model`` settings replace those of ``config``. Rejects what
    is not a checkpoint of this project, or does not fit.
    """
    header, state = read_on_main(Path(path))
    config.model = saved_section(header["config"], "model")
    config.model.check()
    check_layout(config.parallel, config.model, config.train, process.world_size)
    parallel = Parallel(build_model(config.model), dataset.loss_fn, config, process)
    load_model(Path(path), header, state, parallel.module, parallel.device)
    return header, parallel
