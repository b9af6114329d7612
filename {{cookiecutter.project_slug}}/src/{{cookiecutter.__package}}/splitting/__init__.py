"""Splitting the work without changing the result: samples, batches, losses and blocks of any kind.

    dataset[7] in epoch 2     the same for any rank and loader process: torch, random and NumPy are seeded with it
    sum and weight of a loss  the mean over the global batch, for any number of parts

This room knows tensors, modules and datasets in general; it does not know this project's, nor the loop.
"""

from .blocks import build_by_block, place, prepare_blocks
#:: if cookiecutter.__plays ::#
from .environments import derive_seed, to_tensor, to_valid
from .experience import STEPS_PER_MESSAGE, Experience
#:: endif ::#
from .gather import Shares, gather_global_batch, set_shares
from .loaders import build_loader, loader_options, seed_dataset
from .losses import GlobalMean, Loss, Weight, read_loss
from .metrics import Metrics, concatenate, merge, name_some
from .nested import split_batch, to_device, unpack
from .order import permuted
#:: if cookiecutter.__plays ::#
from .policy import Policy, read_outputs
#:: endif ::#
#:: if cookiecutter.__has_stages ::#
from .replication import reshard, shard_replica, to_local
#:: endif ::#
#:: if cookiecutter.__shards_layers ::#
from .replication import GradientBuckets, shard_replica
#:: endif ::#
from .seeding import Key, SeededDataset, identity
#:: if cookiecutter.__cuts_blocks ::#
from .sequence import balance, build_outline
#:: endif ::#
#:: if cookiecutter.__shards_layers ::#
from .sharding import check_plan, check_replicated, parallelize_block, sum_parts
#:: endif ::#
#:: if cookiecutter.__has_stages ::#
from .stages import (
    ScheduledStage,
    Stage,
    assign_stages,
    build_group_after_startup,
    build_schedule,
    build_stages,
    schedule_stages,
    split_into_stages,
    trace_stages,
)
#:: endif ::#
from .streams import InStep, Stream
from .sums import average_buffers
