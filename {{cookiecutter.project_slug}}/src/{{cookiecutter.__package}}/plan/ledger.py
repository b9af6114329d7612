"""What one rank allocates, sends and computes, recorded operation by operation.

A tensor's memory counts from its creation until nothing refers to it. Peaks are kept as lists of what was alive, and
sorted into kinds at the end, when it is known what became of each: a gradient, the optimizer's state, ...
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from .fakes import replaced
from .messages import Message, find_buffers, read_message

aten = torch.ops.aten
# PyTorch's own counter lacks attention on a CPU, where simulated ranks compute.
FORMULAS: dict[Any, Any] = flop_registry | {
    aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}
KINDS = ("weights", "gradients", "optimizer", "communication", "activations")


@dataclass(eq=False)
class Allocation:
    """A tensor's storage: its size in bytes, and what it turned out to be."""

    size: int
    kind: str = "activations"


@dataclass
class Ledger(TorchDispatchMode):
    """Records all operations in a ``with`` block.

    Attributes:
        memory: Bytes in use.
        peak: The most bytes in use.
        messages: Collectives and point-to-point messages since ``begin_step``.
        flops: Floating-point operations since then, of matrix products, convolutions and attention.
    """

    memory: int = 0
    peak: int = 0
    messages: list[Message] = field(default_factory=list)
    flops: int = 0
    alive: dict[int, Allocation] = field(default_factory=dict)  # By the address of the storage.
    at_peak: list[tuple[Allocation, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # It then computes on the rank's part, which comes here.
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        if message := read_message(func, args):
            self.messages.append(message)
            self.classify(find_buffers(func, args), "communication")
        if func.overloadpacket.__name__ == "chunk_cat":  # A block's gradients, on their way into one message.
            self.classify(args[0], "gradients")
        if count := FORMULAS.get(func.overloadpacket):
            self.flops += count(*args, **kwargs, out_val=outputs)
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":  # Which has no memory.
                self.note(tensor.untyped_storage())
        return outputs

    def reset_peak(self) -> None:
        """Take what is in use now for the peak."""
        self.peak = self.memory
        self.at_peak = [(each, each.size) for each in self.alive.values()]

    def begin_step(self) -> None:
        """Count messages and operations anew."""
        self.messages, self.flops = [], 0

    def note(self, storage: torch.UntypedStorage) -> Allocation:
        """Count a storage, or the change of its size."""
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = Allocation(0)
            weakref.finalize(storage, self.forget, key).atexit = False
        allocation, size = self.alive[key], storage.nbytes()
        self.memory += size - allocation.size
        allocation.size = size
        if self.memory > self.peak:
            self.reset_peak()
        return allocation

    def forget(self, key: int) -> None:
        """Discount a storage that is gone."""
        self.memory -= self.alive.pop(key).size

    def classify(self, tensors: Iterable[Any], kind: str) -> None:
        """Note what tensors are; the first kind in ``KINDS`` counts."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            allocation = self.alive.get(local.untyped_storage()._cdata)
            if allocation is not None and KINDS.index(kind) < KINDS.index(allocation.kind):
                allocation.kind = kind

    def peak_by_kind(self) -> dict[str, int]:
        """Return the bytes in use at the peak, by kind."""
        total = Counter[str]()
        for allocation, size in self.at_peak:
            total[allocation.kind] += size
        return {kind: total[kind] for kind in KINDS}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """In a ``with`` block, count storages that change their size, such as weights that are gathered and freed.

        Do not count what DTensor creates without values to find the shapes of results, as large as the whole model.
        """
        resize, propagate = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached

        def resize_and_note(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self.alive:
                allocation = self.note(storage)
                if KINDS.index(allocation.kind) > KINDS.index("communication"):
                    allocation.kind = "communication"
            return result

        def propagate_unseen(*args: Any) -> Any:
            with _disable_current_modes():
                return propagate(*args)

        with (
            replaced(torch.UntypedStorage, "resize_", resize_and_note),
            replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate_unseen),
        ):
            yield
