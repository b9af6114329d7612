"""``convert``: turns a sharded checkpoint into a full one, or vice versa, in one process."""

from pathlib import Path

import torch

from ..config import UserError
from ..runtime import write_atomically
from . import sharded
from .loading import read
from .state_dict import flatten, list_parts, unflatten


def convert(source: Path, output: Path) -> None:
    """Write the checkpoint ``source`` in the other format as ``output``; its tensors stay the same, bit for bit.

    Rejects a ``source`` that cannot be read, and an ``output`` that exists, cannot be written or has the wrong suffix.
    """
    if not source.exists():
        raise UserError(f"--checkpoint is {source}: no such file")
    kind, suffix = ("full", ".pt") if source.is_dir() else ("sharded", ".dcp")
    if output.suffix != suffix:
        raise UserError(f"--output is {output}; for a {kind} checkpoint, give a name that ends in {suffix}")
    if output.exists():
        raise UserError(f"--output is {output}, which exists already; give another name")
    content = read(source)
    try:
        if kind == "full":
            state = unflatten(sharded.load_in_one_process(source, content))
            header = {name: part for name, part in content.items() if name not in ("metadata", "checksums")}
            write_atomically(output, lambda file: torch.save(state | header, file))
        else:
            header = {name: part for name, part in content.items() if name not in list_parts(content)}
            sharded.save_in_one_process(output, header, flatten(content))
    except OSError as error:
        raise UserError(str(error)) from None
