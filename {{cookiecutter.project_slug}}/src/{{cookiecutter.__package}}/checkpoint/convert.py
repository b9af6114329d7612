"""``convert``: writes a checkpoint in another format, or exports its weights, in one process."""

from pathlib import Path

import torch

from ..config import UserError
from ..runtime import write_atomically
from . import exported, sharded
from .loading import read, read_model
from .state_dict import flatten, list_parts, unflatten

# By the suffix of what is converted.
OUTPUTS = {".pt": (".dcp", ".safetensors"), ".dcp": (".pt", ".safetensors"), ".safetensors": (".pt",)}


def convert(source: Path, output: Path) -> None:
    """Write the checkpoint ``source`` as ``output``, in the format of its suffix; tensors stay the same, bit for bit.

        .pt             a full checkpoint of a sharded one; a plain ``state_dict`` of exported weights
        .dcp            a sharded checkpoint of a full one
        .safetensors    the weights of either, with what builds the model again

    Rejects a ``source`` that cannot be read, and an ``output`` that exists, cannot be written or has the wrong suffix.
    """
    if not source.exists():
        raise UserError(f"--checkpoint is {source}: no such file")
    kind = ".dcp" if source.is_dir() else exported.SUFFIX if source.suffix == exported.SUFFIX else ".pt"
    if output.suffix not in OUTPUTS[kind]:
        raise UserError(f"--output is {output}; of {source}, give a name that ends in {' or '.join(OUTPUTS[kind])}")
    if output.exists():
        raise UserError(f"--output is {output}, which exists already; give another name")
    content = read(source)
    try:
        if output.suffix == exported.SUFFIX:
            exported.write(output, content, read_model(source, content))
        elif kind == exported.SUFFIX:
            write_atomically(output, lambda file: torch.save(content["model"], file))
        elif kind == ".dcp":
            state = unflatten(sharded.load_in_one_process(source, content))
            header = {name: part for name, part in content.items() if name not in ("metadata", "checksums")}
            write_atomically(output, lambda file: torch.save(state | header, file))
        else:
            header = {name: part for name, part in content.items() if name not in list_parts(content)}
            sharded.save_in_one_process(output, header, flatten(content))
    except OSError as error:
        raise UserError(str(error)) from None
