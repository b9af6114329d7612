"""Checks before any process starts: what cannot work is rejected in one line."""

import errno
import os
import socket
from urllib.parse import urlsplit

from ..config import ModelConfig, ParallelConfig, TrainConfig, UserError
from .environment import read_nodes
from .values import check_variables


def check_batch(global_batch_size: int, shares: int, microbatches: int) -> None:
    """Reject a global batch that does not divide into equal shares and micro-batches."""
    unit = shares * microbatches
    if global_batch_size % unit:
        below, above = global_batch_size // unit * unit, -(-global_batch_size // unit) * unit
        fits = " or ".join(str(size) for size in (below, above) if size)
        raise UserError(
            f"data.global_batch_size is {global_batch_size}, which does not divide into {shares} share(s) x "
            f"{microbatches} micro-batch(es); {fits} would"
        )


#:: include "parallelism/" ~ cookiecutter.parallelism ~ "/checks.py" ::#


def check_port(init_method: str) -> None:
    """Reject a rendezvous port that another program on this machine listens on."""
    nodes = read_nodes()
    if init_method.startswith("tcp://"):
        port, remedy = urlsplit(init_method).port, "give another in --distributed.init_method"
    else:
        port, remedy = nodes.port, "set PORT to another on all machines"
    if not port or nodes.rank != 0:
        return
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port in use on this machine: {port}; wait for what uses it, or {remedy}") from None


def count_ranks(parallel: ParallelConfig, device: str) -> int:
    """Return how many ranks to start on this machine: ``NPROC``, or a default for its accelerators."""
    check_variables()
    value = os.environ.get("NPROC", "")
    if value:
        if not value.isdecimal() or int(value) < 1:
            raise UserError(f"NPROC is '{value}'; give the number of ranks to start, 1 or more")
        return int(value)
    if device == "cpu":
        return parallel.default_nproc(devices=0)
    import torch  # Only here: it takes seconds to import.

    return parallel.default_nproc(torch.accelerator.device_count())
