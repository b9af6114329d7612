"""The interface between the loop and ``parallel.py``, and the code that all strategies share."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .config import Config
from .runtime import Process
from .splitting import GlobalMean, Loss, Shares, Weight, average_buffers, set_shares

BuildFn = Callable[[], nn.Module]
LossFn = Callable[[Any, Any], tuple[Loss, Weight]]  # Of outputs and targets.


class Strategy(ABC):
    """How a model and its batches are distributed over ranks and devices; the rest of the package uses nothing else.

    ``parallel.py`` defines this project's subclass, which is built as ``Parallel(build, loss_fn, config, process)``:
    each call of ``build`` builds the model on the CPU, with the same weights on every rank if the generators are in the
    same state, and ``loss_fn`` is that of ``dataset.py``.

    Attributes:
        module: This rank's part of the model; its parameters have the same names as in the whole model.
        waits_in_forward: Whether ranks wait for each other in forward, and not only for gradients.
        device: The device that inputs and targets have to be on.
        dp_rank: This rank in the data-parallel (dp) dimension: the share of each batch that it reads.
        dp_size: Number of shares.
        dp_group: The ranks that read the different shares, over which buffers are averaged; None means all ranks.
        microbatches: Number of micro-batches that a share is split into.
        dtype: What forward and backward compute in (``train.precision``).
        autocast: Returns a context manager that computes in ``dtype``.
    """

    module: nn.Module
    waits_in_forward = False

    def __init__(
        self, loss_fn: LossFn, config: Config, process: Process, dp_rank: int, dp_group: dist.ProcessGroup | None = None
    ) -> None:
        self.loss_fn, self.device, self.microbatches = loss_fn, process.device, config.train.microbatches
        self.dp_rank, self.dp_size, self.dp_group = dp_rank, config.parallel.dp_size(process.world_size), dp_group
        share = config.data.global_batch_size // self.dp_size
        set_shares(Shares(self.dp_rank, self.dp_size, dp_group, self.microbatches, share))
        self.losses = GlobalMean(config.data.global_batch_size, self.microbatches * self.dp_size, self.device)
        self.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config.train.precision]
        enabled = self.dtype is not torch.float32
        self.autocast = partial(
            torch.autocast, self.device.type, dtype=self.dtype if enabled else None, enabled=enabled
        )

    @abstractmethod
    def forward_backward(self, inputs: Any, targets: Any, scaler: torch.amp.GradScaler) -> dict[str, Tensor]:
        """Run forward and backward of one global batch, of which this rank has a share.

        Leaves in each parameter the gradient of the mean loss over the global batch, times the scaler's factor.

        Args:
            inputs: This rank's inputs, ``global_batch_size / dp_size`` of them.
            targets: Their targets.
            scaler: Scales the loss if the precision is fp16.

        Returns:
            This rank's part of each mean loss, detached scalars on the device: the sum over all ranks is the mean.
        """

    @abstractmethod
    def predict(self, inputs: Any) -> Any:
        """Return the model's outputs for this rank's ``inputs``, or None on ranks that do not hold them.

        All ranks have to call it the same number of times.
        """

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the norm of the whole model's gradient to ``max_norm``; returns the norm before clipping."""
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def add_loss(self, outputs: Any, targets: Any) -> Tensor:
        """Return one micro-batch's part of the mean loss over the global batch, to run backward on."""
        return self.losses.add(self.loss_fn(outputs, targets))

    def finish_losses(self) -> dict[str, Tensor]:
        """Return this rank's part of each mean loss of the step, when all gradients are complete."""
        return self.losses.finish(self.module, self.dp_group)

    def average_buffers(self) -> None:
        """Average BatchNorm's statistics over ranks with different samples; a collective."""
        average_buffers(self.module, self.dp_group, self.dp_size)

    def align_random_state(self) -> None:  # noqa: B027
        """Give ranks that compute the same the same random numbers, for example for dropout; a collective."""
