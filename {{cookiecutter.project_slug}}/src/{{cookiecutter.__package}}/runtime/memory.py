"""Memory: what a step frees is kept for the next one, and an error says what takes it all, and what needs less.

out of memory after step 4: tried to allocate 64.00 MiB; rank 0 holds 1140 MiB in tensors (21 x float32
[512, 256, 8, 8]: 672 MiB; ...); lower data.global_batch_size ...
"""

import ctypes
import gc
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..config import UserError

SHOWN = 3  # Kinds of tensors that the message names.
SNAPSHOTS: set[Path] = set()  # The file to write, if allocations are recorded.
SHORTAGE = "out of memory"
REMEDY = (
    "lower data.global_batch_size (data.eval_batch_size in an evaluation), raise train.microbatches, or set "
    "train.activation_checkpointing"
)

# Parameters of mallopt(3), with values in bytes: the size from which on a block gets pages of its own, at most 32 MiB,
# and the free memory at the end of the heap that is kept.
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = (-3, 32 * 2**20), (-1, 256 * 2**20)


def keep_freed_memory() -> None:
    """Let glibc keep what a step frees for the next step, in which new pages would take up to a tenth of the time.

    The environment variables of mallopt(3) take precedence.
    """
    if sys.platform == "linux" and not any(name.startswith("MALLOC_") for name in os.environ):
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(*M_MMAP_THRESHOLD)
            libc.mallopt(*M_TRIM_THRESHOLD)


def record_allocations(device: torch.device, path: Path) -> None:
    """Write to ``path``, if memory runs out, what was allocated where; rejects a device that has no such record.

    https://pytorch.org/memory_viz shows the file.
    """
    if device.type != "cuda":
        raise UserError(f"train.memory_snapshot records a CUDA GPU's memory, but this rank uses the {device}; unset it")
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    SNAPSHOTS.add(path)


@contextmanager
def explain_out_of_memory(describe_progress: Callable[[], str]) -> Iterator[None]:
    """Replace the message of an out-of-memory error by one that names progress, tensors and remedies."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            for path in SNAPSHOTS:
                torch.cuda.memory._dump_snapshot(str(path))
            error.args = (f"{SHORTAGE} {describe_progress()}: {describe(error)}; {REMEDY}",)
        raise


def is_out_of_memory(error: Exception) -> bool:
    """Return whether this is such an error, not yet explained; the CPU's has no type of its own."""
    has_type = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
    return has_type and not str(error).startswith(SHORTAGE)


def describe(error: Exception) -> str:
    """Return what was to be allocated, by PyTorch's message, and the largest tensors that this rank holds there."""
    wanted = re.search(r"tried to allocate [\d.]+ \w+", str(error), re.IGNORECASE)
    attempt = wanted[0].lower() if wanted else str(error)
    sizes, counts = Counter[str](), Counter[str]()
    for tensor in held_tensors(on_accelerator=isinstance(error, torch.OutOfMemoryError)):
        kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        sizes[kind] += tensor.nbytes
        counts[kind] += 1
    largest = "; ".join(f"{counts[kind]} x {kind}: {size / 2**20:.0f} MiB" for kind, size in sizes.most_common(SHOWN))
    return f"{attempt}; rank {dist.get_rank()} holds {sizes.total() / 2**20:.0f} MiB in tensors ({largest})"


def held_tensors(*, on_accelerator: bool) -> list[Tensor]:
    """Return the tensors of which Python knows, with their gradients, once for each storage; on the CPU or not.

    What is kept for backward is known only to autograd. A DTensor's shard is a tensor of its own.
    """
    known = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    gradients = [each.grad for each in known if each.is_leaf and each.grad is not None]
    here = [each for each in (*known, *gradients) if (each.device.type != "cpu") == on_accelerator]
    found = {each.untyped_storage().data_ptr(): each for each in here if each.layout is torch.strided}
    return [tensor for address, tensor in found.items() if address]
