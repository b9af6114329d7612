"""Losses over the whole batch, such as those of CLIP and SimCLR, which compare each sample with those of all ranks."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import UserError


@dataclass
class Shares:
    """How the global batch is divided: this rank's share, the number of shares, the ranks with them, a share's size."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    microbatches: int = 1
    samples: int = 1


_shares = Shares()


def set_shares(shares: Shares) -> None:
    """Set what ``gather_global_batch`` gathers; the strategy does it once."""
    global _shares
    _shares = shares


def gather_global_batch(own: Tensor) -> tuple[Tensor, Tensor]:
    """Gather what all ranks computed for their samples, with gradients; a collective, for use in ``loss_fn``.

    A ``loss_fn`` that returns the sum over this rank's samples of a loss that depends on all samples then has the same
    value and gradients for any split. Rejects micro-batches, which see only a part of the batch, and another number of
    rows on some rank.

    Args:
        own: One row (or two, three ...) for each of this rank's samples, for example embeddings of shape
            (samples, features).

    Returns:
        The rows of the global batch, in its order, and the positions of this rank's rows, of shape (samples,).
    """
    if _shares.microbatches > 1:
        raise UserError(
            f"the loss compares all samples of a batch, but train.microbatches is {_shares.microbatches}; give 1"
        )
    if len(own) % _shares.samples:
        raise UserError(
            f"gather_global_batch was given {len(own)} rows for {_shares.samples} samples; give each sample the same "
            "number of rows, and mask those that do not count"
        )
    positions = torch.arange(_shares.rank, len(own) * _shares.size, _shares.size, device=own.device)
    return (_Gather.apply(own, _shares) if _shares.size > 1 else own), positions


class _Gather(torch.autograd.Function):
    """All-gather forward; backward sums the gradients that all ranks have for this rank's rows."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, own: Tensor, shares: Shares) -> Tensor:
        ctx.shares = shares  # type: ignore[attr-defined]
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(shares.size)]
        dist.all_gather(parts, own.contiguous(), group=shares.group)
        # Share r has every size-th sample of the global batch, from the r-th on.
        return torch.stack(parts, dim=1).flatten(0, 1)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        shares: Shares = ctx.shares  # type: ignore[attr-defined]
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=shares.group)
        return gradient[shares.rank :: shares.size], None
