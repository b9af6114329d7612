"""Exact evaluation: every sample counts once, for any number of ranks."""

#:: if cookiecutter.__plays ::#
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.vector import SyncVectorEnv
from PIL import Image

from . import dataset
from .checkpoint import load_model, read_on_main, saved_section
from .config import Config, DataConfig
from .launch import check_layout, make_environment
from .model import build_model
from .parallel import Parallel
from .reporting import append_record
from .runtime import Process, all_gather_object, on_main
from .splitting import Policy, derive_seed, to_tensor, to_valid
from .strategy import Strategy
#:: else ::#
from collections.abc import Callable
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
#:: endif ::#

Metrics = dict[str, np.ndarray]  # Per sample: arrays by name, whose first dimension is the samples.
Context = Callable[[], AbstractContextManager[None]]


#:: include cookiecutter.__loop_of_task ~ "/evaluator.py" ::#


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
    #:: if cookiecutter.__plays ::#
    test_set.experience.environment_steps = header["experience"]["environment_steps"]
    #:: endif ::#
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
