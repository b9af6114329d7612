"""What a rank holds while a model is built, saved and loaded; `test_start.py` starts this program on several ranks.

The bytes are those that PyTorch's allocator reports to the profiler: they depend on no machine, and count neither what
a file is mapped to nor what Python holds.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lab import Lab, local, take_steps
from torch import nn
from torch.profiler import ProfilerActivity, profile

# Sixteen blocks of one size, and an optimizer that moves every weight.
MODEL = "--model.width 128 --model.layers 16 --model.heads 4 --model.context 16 --optim.warmup_steps 0".split()


def peak(action: Callable[[], Any], file: Path | None = None) -> tuple[Any, int]:
    """Return what ``action`` returns, and how many bytes of tensors there were meanwhile, more than before it.

    A ``file`` that is mapped to memory does not count.
    """
    mapped = file.stat().st_size if file is not None and file.is_file() else None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        result = action()
    assert trace.profiler is not None and trace.profiler.kineto_results is not None
    events = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes() if abs(event.nbytes()) != mapped else 0
        highest = max(highest, held)
    return result, highest


def size(module: nn.Module) -> int:
    """Return the bytes of a module's tensors, as far as this rank holds them."""
    return sum(local(tensor).nbytes for tensor in module.state_dict().values())


def build_on_accelerator(lab: Lab) -> nn.Module:
    """Build the strategy on the meta device, in the place of an accelerator: what is there takes no memory here."""
    config, parallel = lab.settings(*MODEL), lab.module("parallel")
    process = replace(lab.process, device=torch.device("meta", 0))
    torch.manual_seed(config.run.seed)
    build = partial(lab.module("model").build_model, config.model)
    with (
        mock.patch.object(parallel, "DistributedDataParallel", create=True),
        mock.patch.object(torch.accelerator, "device_count", return_value=1),
    ):
        module: nn.Module = parallel.Parallel(build, None, config, process).module
    return module


def build_trainer(lab: Lab, *words: str) -> Any:
    """Build a trainer, which also keeps an average of the weights; its restored state is then all that a run has."""
    trainer = lab.trainer(*MODEL, *words)
    average = {name: p.detach().clone() for name, p in trainer.parallel.module.named_parameters()}
    trainer.checkpointer.register("average", SimpleNamespace(state_dict=lambda: average), "tensors")
    return trainer


def same_values(lab: Lab, trainer: Any, whole: nn.Module) -> bool:
    """Return whether the ranks together hold the values of ``whole``, bit for bit; on rank 0, and True on others."""
    gather = lab.module("checkpoint.state_dict").gather_full_tensors
    found = gather(trainer.parallel.module.state_dict(), trainer.process.device)
    expected = whole.state_dict() if lab.process.is_main else {}
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def observe_loading(lab: Lab, form: str) -> dict[str, int]:
    """Save a run, and return the peaks when it is resumed, and when another starts from its weights."""
    trainer = build_trainer(lab, "--checkpoint.format", form)
    take_steps(trainer)
    trainer.progress.step = 1
    trainer.write_checkpoint()
    trainer.checkpointer.wait()
    (path,) = (trainer.checkpointer.run_dir / "checkpoints").glob("step-*")
    resumed, load_weights = build_trainer(lab), lab.module("checkpoint").load_weights
    peaks = {"resume": peak(lambda: resumed.restore([path]), path)[1]}
    module, device, files = resumed.parallel.module, lab.process.device, [path]
    if form == "full":
        files.append(path.with_suffix(".safetensors"))
        if lab.process.is_main:
            lab.module("checkpoint").convert(*files)
        dist.barrier()
    for file in files:
        peaks[f"weights{file.suffix}"] = peak(lambda file=file: load_weights(file, [], module, device), file)[1]
    return peaks


def main(package: str, folder: Path) -> None:
    """Observe this rank, and write into the folder what it held."""
    lab = Lab(package, "language", folder)
    config = lab.settings(*MODEL)
    with lab.module("runtime").process_group(config.distributed, config.parallel.devices_per_rank()) as lab.process:
        whole = lab.whole_model(*MODEL)
        outcome: dict[str, Any] = {
            "whole": size(whole),
            "block": max(size(block) for block in whole.children()),
            "tensor": max(tensor.nbytes for tensor in whole.state_dict().values()),
        }
        if not lab.module("parallel").Parallel.waits_in_forward:  # Each rank has the whole model on its devices.
            outcome["host"] = peak(lambda: build_on_accelerator(lab))[1]
        trainer, outcome["start"] = peak(lambda: lab.trainer(*MODEL))
        outcome |= {"share": size(trainer.parallel.module), "same values": same_values(lab, trainer, whole)}
        del trainer, whole
        for form in ("full", "sharded"):
            outcome |= {f"{name}, {form}": value for name, value in observe_loading(lab, form).items()}
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
