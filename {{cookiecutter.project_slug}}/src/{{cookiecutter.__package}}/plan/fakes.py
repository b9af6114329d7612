"""What a simulated rank computes with: tensors without values, and a process group that sends nothing.

fake_process_group(rank=3, world_size=64)    this process is rank 3 of 64, and what it sends goes nowhere
FakeTensors()                                tensors have shapes and no values, so any model fits
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves


class FakeTensors(FakeTensorMode):
    """Computes shapes instead of values, in a ``with`` block; but numbers that PyTorch reads are real.

    These are what ``torch.arange`` returns, such as the ranks of a mesh, integers of 32 bits, in which PyTorch notes an
    order, and what is computed from real tensors alone.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        # This memo has weak references to tensors, and a module moves no parameter that has one.
        self.fake_tensor_converter.set_tensor_memo = lambda *_: None  # type: ignore[method-assign]

    def __deepcopy__(self, _: Any) -> "FakeTensors":
        return self  # A copied tensor belongs to the same simulation.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_read = func.overloadpacket is torch.ops.aten.arange or kwargs.get("dtype") is torch.int32
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors) and (tensors or is_read):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if func.namespace == "c10d":
            return complete(func, args[0])
        return super().__torch_dispatch__(func, types, args, kwargs)


def complete(func: Any, tensors: Any) -> Any:
    """Return what a collective on ``tensors`` returns that has sent nothing, and is complete."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(tensors)  # Whoever waits reads it there.
    work = _create_work_from_future(future).boxed()
    return work if len(func._schema.returns) == 1 else (tensors, work)


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Make this process rank ``rank`` of a process group whose other ranks do not exist."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute for the duration of a ``with`` block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
