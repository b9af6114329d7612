"""``convert``: a full checkpoint from a sharded one, or the other way; one process, which holds the whole of it."""

from __future__ import annotations

from pathlib import Path

import torch

from . import sharded
from .checkpoint import read
from .config import UserError
from .rundir import write_atomically
from .state import fold, unfold


def convert(source: Path, output: Path) -> None:
    """Write the checkpoint ``source`` in the other format, its tensors bit by bit the same.

    Args:
        source: A folder, of which a file is made; or a file, of which a folder is made.
        output: Where; nothing may be there yet.

    Raises:
        UserError: if ``source`` cannot be read, or ``output`` cannot be written or has the name of the other kind.
    """
    if not source.exists():
        raise UserError(f"--checkpoint is {source}: no such file")
    kind, suffix = ("full", ".pt") if source.is_dir() else ("sharded", ".dcp")
    if output.suffix != suffix:
        raise UserError(f"--output is {output}; for a {kind} checkpoint, give a name that ends in {suffix}")
    if output.exists():
        raise UserError(f"--output is {output}, which is there already; give another name")
    content = read(source)
    try:
        if kind == "full":
            whole = fold(sharded.load_alone(source, content))
            rest = {name: part for name, part in content.items() if name not in ("metadata", "checksums")}
            write_atomically(output, lambda file: torch.save(whole | rest, file))
        else:
            rest = {name: part for name, part in content.items() if name not in ("model", "optimizer")}
            sharded.save_alone(output, rest, unfold(content))
    except OSError as error:
        raise UserError(str(error)) from None
