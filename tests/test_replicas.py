"""What ranks should hold in common is compared, and data that differs between ranks is refused at the start."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from conftest import CHOICES, Bake, run
from runs import SHORT, edit, last_step, launch, plant

pytestmark = pytest.mark.slow

CHECKED = (*SHORT, "--train.check_replicas_every", "2")
# Several ranks hold each part of the model: how many ranks to start, and with which settings.
LAYOUTS = {
    "ddp": (2, ()),
    "fsdp": (4, ("--parallel.replicas", "2")),
    "model_parallel": (2, ()),
    "pipeline": (4, ("--parallel.replicas", "2")),
    "tensor": (4, ("--parallel.replicas", "2")),
    "data_parallel": (1, ()),
}


def add_dropout(project: Path) -> Path:
    """Make the model draw random numbers in training."""
    mean = "features.mean(dim=(2, 3))"
    edit(project, "model.py", f"self.linear({mean})", f"self.linear(F.dropout({mean}, training=self.training))")
    return project


@pytest.mark.parametrize("parallelism", CHOICES["parallelism"])
def test_replicas_stay_replicas_with_dropout(bake: Bake, tmp_path: Path, parallelism: str) -> None:
    project, (nproc, layout) = add_dropout(bake(parallelism=parallelism)), LAYOUTS[parallelism]
    launch(project, "train", *CHECKED, *layout, "--run.dir", tmp_path / "run", nproc=nproc)
    assert last_step(tmp_path / "run") == 6


@pytest.mark.parametrize("parallelism", [name for name in CHOICES["parallelism"] if name != "data_parallel"])
def test_a_replica_that_differs_ends_the_run(bake: Bake, tmp_path: Path, parallelism: str) -> None:
    project, (nproc, layout) = bake(parallelism=parallelism, launcher="spawn"), LAYOUTS[parallelism]
    fault = (
        "if progress.step == 3 and self.process.rank == 0:\n"
        "    parameter = list(self.parallel.module.parameters())[0].detach()\n"
        "    getattr(parameter, '_local_tensor', parameter).flatten()[0] += 1e-6"
    )
    plant(project, "train.py", "        progress.step += 1\n", fault)
    words = (*CHECKED, *layout, "--run.dir", tmp_path / "run")
    error = launch(project, "train", *words, nproc=nproc, expect=2).stderr
    assert re.search(r"^error: after step 4, .* do not: model\.\S+ on ranks? 0( and|, )", error, re.MULTILINE), error


COMPARE = """
import sys, torch
from my_experiment.checkpoint import replicas
seen = []
replicas.all_gather_object = lambda own: seen.append(own) or [own]
parts = [[1.0, 2.0], [2.0, 1.0], [1.0, -2.0], [2.0, 2.0], [], [1.0, 2.0]]
for part in parts:
    replicas.check_replicas({"weight": torch.tensor(part), "half": torch.tensor(part, dtype=torch.bfloat16)}, step=1)
print([parts.index(part) for part in parts] == [seen.index(own) for own in seen])
"""


def test_tensors_are_compared_bit_for_bit(plain: Path) -> None:
    """Other orders, signs and pairs of the same values differ; a shard may be empty."""
    assert run(sys.executable, "-c", COMPARE, cwd=plain, PYTHONPATH="src").stdout == "True\n"


BUFFERS = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from my_experiment.splitting import average_buffers
rank = int(os.fork() > 0)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/meet", rank=rank, world_size=2)
model = nn.Sequential(nn.BatchNorm1d(1), nn.Identity())
model[0].running_mean += rank
model[1].register_buffer("scale", torch.tensor([5.0 + rank]))
model[1].register_buffer("count", torch.tensor([5 + rank]))
average_buffers(model, None, 2)
with open(f"{sys.argv[1]}/{rank}", "w") as file:
    print(*(float(value) for value in (model[0].running_mean, model[1].scale, model[1].count)), file=file)
dist.destroy_process_group()
if rank:
    os.wait()
"""


def test_only_batch_norm_statistics_are_averaged(plain: Path, tmp_path: Path) -> None:
    """Other floating-point buffers become those of the first rank; whole numbers are left alone."""
    run(sys.executable, "-c", BUFFERS, tmp_path, cwd=plain, PYTHONPATH="src")
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["0.5 5.0 5.0\n", "0.5 5.0 6.0\n"]


OTHER_DATA = {  # What a rank does with its labels, and what the message says of it.
    "self.labels[: 1400 + rank]": "has 1400 samples on rank 0 and 1401 on rank 1",
    "self.labels + rank * (self.labels == self.labels[len(self.labels) // 2])": "sample 718 of Digits is not the same",
}


@pytest.mark.parametrize("labels", OTHER_DATA)
def test_other_data_on_a_rank_is_refused(bake: Bake, tmp_path: Path, labels: str) -> None:
    project = bake(launcher="spawn")
    fault = f"rank = torch.distributed.get_rank()\nself.labels = {labels}"
    plant(project, "dataset.py", "        self.max_shift = max_shift\n", fault)
    error = launch(project, "train", *SHORT, "--run.dir", tmp_path / "run", expect=2).stderr
    assert re.findall(r"^error: .*$", error, re.MULTILINE) and OTHER_DATA[labels] in error, error
    assert not list(tmp_path.glob("run/checkpoints/*"))
