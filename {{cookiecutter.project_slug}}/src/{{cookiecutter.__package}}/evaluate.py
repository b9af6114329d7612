"""Exact evaluation: every sample counts once, for any number of ranks."""

#:: if cookiecutter.__plays ::#
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.vector import SyncVectorEnv

from . import dataset
from .checkpoint import damage_on_any_rank, load_model, read_on_main, saved_section
from .config import Config, DataConfig
from .launch import check_layout, make_environment, take_environment
from .model import build_model
from .parallel import Parallel
from .reporting import Film, append_record, collect_examples, write_examples
from .runtime import Context, Process, all_gather_object, on_main
from .splitting import STEPS_PER_MESSAGE, Metrics, Policy, derive_seed, merge, to_tensor, to_valid
from .strategy import Strategy
#:: else ::#
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from . import dataset
from .checkpoint import load_model, read_on_main, saved_section
from .config import Config, DataConfig, UserError
from .data import EvalSampler
from .launch import check_layout
from .model import build_model
from .parallel import Parallel
from .reporting import append_record, collect_examples, write_examples
from .runtime import Context, Process, all_gather_object, on_main
from .splitting import Metrics, build_loader, concatenate, merge, seed_dataset, to_device, unpack
from .strategy import Strategy
#:: endif ::#


#:: include cookiecutter.__loop_of_task ~ "/evaluator.py" ::#


def evaluate(path: str, config: Config, process: Process) -> None:
    """Evaluate the checkpoint at ``path`` on the test set, print its metrics, and show examples in ``run.dir``."""
    header, parallel = load_strategy(path, config, process)
    record = {"event": "eval", "step": header["progress"]["step"], "split": "test"}
    #:: if cookiecutter.__plays ::#
    take_environment(path, saved_section(header["config"], "control"), config.control)
    with damage_on_any_rank(Path(path)):
        record["environment_steps"] = header["experience"]["environment_steps"]
    #:: endif ::#
    _, test_set = dataset.build_datasets(config)
    evaluator = Evaluator(test_set, parallel, config.data, config.run.seed)
    record |= evaluator()
    on_main(lambda: append_record(record, config.run.dir))
    examples = collect_examples(dataset, evaluator) if config.run.dir else {}
    if process.is_main:
        write_examples(Path(config.run.dir), examples)


def load_strategy(path: str, config: Config, process: Process) -> tuple[dict[str, Any], Strategy]:
    """Load the checkpoint at ``path``; returns its header, and its model under this project's strategy. A collective.

    The model is the one that was saved: the checkpoint's ``model`` settings replace those of ``config``. Rejects what
    is not a checkpoint of this project, or does not fit.
    """
    header, state = read_on_main(Path(path))
    config.model = saved_section(header["config"], "model")
    config.model.check()
    check_layout(config.parallel, config.model, config.train, process.world_size)
    parallel = Parallel(lambda: build_model(config.model), dataset.loss_fn, config, process)
    load_model(Path(path), header, state, parallel.module, parallel.device)
    return header, parallel
