"""Checkpoints: saving a run and resuming it, under any strategy and on any number of ranks.

    step-00000440.pt     full: one file, which rank 0 assembles and writes; loads into any PyTorch program
    step-00000440.dcp    sharded: a folder into which each rank writes what it holds, while training continues
    my.safetensors       exported: the weights alone, for evaluation and for any other program

The first two have the same content: full tensors under the names of the whole model, and the rest of the run's state.

This room knows modules, optimizers and the process group; it does not know how the work is split or what is trained.
"""

from .changes import saved_section
from .checkpointer import Checkpointer
from .content import Progress
from .convert import convert
from .loading import damage_on_any_rank, load_model, read_on_main
from .replicas import check_replicas
from .weights import load_weights
