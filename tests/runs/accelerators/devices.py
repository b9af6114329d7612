"""Eight CUDA devices without CUDA, on which all that only an accelerator reaches runs on a CPU.

Tensors on them have shapes, types and a device, and no values: a number that is read is 1, and a bool is False. Tensors
on the CPU are real. Import this before PyTorch, which looks for devices once, with DEVICES as the path of the library
that `g++` makes of devices.cpp.
"""

from __future__ import annotations

import ctypes
import functools
import os
import traceback
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

_torch = find_spec("torch")
assert _torch is not None and _torch.submodule_search_locations
ctypes.CDLL(f"{_torch.submodule_search_locations[0]}/lib/libtorch_cpu.so")
ctypes.CDLL(os.environ["DEVICES"])

import torch  # noqa: E402
import torch.cuda._pin_memory_utils  # noqa: E402
import torch.distributed.fsdp  # noqa: E402
from messages import Message, is_message, message_of  # noqa: E402
from torch._subclasses import FakeTensor, FakeTensorMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map_only  # noqa: E402

aten = torch.ops.aten
CUDA = torch.device("cuda")
# Where the host has waited for a device: lines of the project.
waits: list[str] = []
# What this rank has sent.
messages: list[Message] = []


def line_of_project() -> str:
    """Return the project's line that runs now."""
    for frame in reversed(traceback.extract_stack()):
        if "/src/" in frame.filename:
            return f"{os.path.basename(frame.filename)}:{frame.lineno} {frame.line}"
    return "no line of the project"


class Stream:
    """A stream or an event: there is nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", torch.accelerator.current_device_index())

    def synchronize(self) -> None:
        synchronize()

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def synchronize(*_: Any) -> None:
    """Note that the host waits for a device."""
    waits.append(line_of_project())


def install() -> None:
    """Replace what asks CUDA itself, and would fail or look for its libraries."""
    current = [0]

    def choose(device: Any) -> None:
        current[0] = device if isinstance(device, int) else torch.device(device).index

    cuda: Any = torch.cuda
    accelerator: Any = torch.accelerator
    # CUDA's library counts the devices, and knows the current one.
    cuda.is_available = accelerator.is_available = cuda.is_initialized = lambda: True
    cuda._lazy_init = lambda: None
    cuda.device_count = accelerator.device_count = lambda: 8
    accelerator.current_accelerator = lambda *_, **__: CUDA
    cuda.current_device = accelerator.current_device_index = lambda: current[0]
    cuda.set_device = accelerator.set_device_index = choose
    # It orders work by streams and events, for which only the host's waits matter here.
    cuda.synchronize = accelerator.synchronize = synchronize
    cuda.Stream = cuda.Event = Stream
    cuda.current_stream = cuda.default_stream = Stream
    cuda.stream = cuda.device = nullcontext
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]
    # What it knows of a device: its name, for the peak of operations, bf16, and the memory in use.
    cuda.get_device_name = lambda _: "NVIDIA H100"
    cuda.is_bf16_supported = lambda **_: True
    accelerator.max_memory_allocated = lambda: 0
    # It draws random numbers, of which there are none.
    cuda.manual_seed = cuda.manual_seed_all = lambda _: None
    cuda.get_rng_state = lambda _="cuda": torch.zeros(16, dtype=torch.uint8)  # A seed, and an offset.
    cuda.set_rng_state = lambda *_: None
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor() makes a tensor on the CPU, and copies it.
    # DDP compares the shapes of parameters, which it gathers as numbers.
    torch.nn.parallel.distributed._verify_param_shape_across_processes = lambda *_: None
    torch.Tensor.isfinite = is_finite  # type: ignore[method-assign, assignment]
    # Copies of a sharded save lie in pinned memory.
    torch.cuda._pin_memory_utils.pin_memory = torch.cuda._pin_memory_utils.unpin_memory = lambda *_: None
    fully_shard = torch.distributed.fsdp.fully_shard

    @functools.wraps(fully_shard)
    def shard(module: Any, **options: Any) -> Any:
        move(module, torch.device("cuda", current[0]))
        return fully_shard(module, **options)

    torch.distributed.fsdp.fully_shard = shard


def move(module: torch.nn.Module, device: torch.device) -> None:
    """Move what fully_shard would move by an assignment to ``.data``: fake and real tensors differ in class."""
    moved = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.is_cpu:
                if parameter not in moved:  # It may be shared.
                    moved[parameter] = torch.nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
                owner._parameters[name] = moved[parameter]
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_cpu:
                owner._buffers[name] = buffer.to(device)


def is_finite(tensor: torch.Tensor) -> Any:
    """Return of numbers that are not there that they are finite, which the host waits for."""
    if tensor.device.type == "cpu":
        return torch.isfinite(tensor)
    synchronize()
    return True


class Devices(FakeTensorMode):
    """Runs operations on the devices without values, and those on the CPU as they are."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        # The mode would keep weak references to tensors on the CPU, and module.to() cannot move those.
        self.fake_tensor_converter.set_tensor_memo = lambda *_: None  # type: ignore[method-assign]
        self.depth = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation: a message is noted, and so is a wait of the host, which gets ones for what it reads."""
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_on_device = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if is_message(func) and not self.depth:
            messages.append(message_of(func, args, line_of_project()))
        operation = func.overloadpacket
        target = kwargs.get("device")
        if not is_on_device and (target is None or target.type != "cuda"):
            return func(*args, **kwargs)
        if operation is aten._local_scalar_dense:
            synchronize()
            dtype = args[0].dtype
            return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if operation is aten._to_copy:
            kinds = {tensors[0].device.type, target.type} if target is not None else set()
            if kinds == {"cpu", "cuda"} and not kwargs.get("non_blocking"):
                synchronize()
            if target is not None and target.type == "cpu":
                return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if operation is aten.copy_ and args[0].device.type != args[1].device.type:
            if not (kwargs.get("non_blocking") or args[2:3] == (True,)):
                synchronize()
            if args[0].device.type == "cpu":
                return args[0]  # It keeps its numbers: DDP reads its order of buckets back so.
        if not is_on_device and tensors:  # A copy to a device.
            args, kwargs = tree_map_only(torch.Tensor, self.from_tensor, (args, kwargs))
        self.depth += 1  # Inside, the mode may run the same operation again.
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.depth -= 1
