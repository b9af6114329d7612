"""What a user's own model may do: the result is that of one process, or the run ends with a line that says why not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from conftest import Bake
from recipes import apply
from runs import SHORT, alone, assert_close, edit, launch, losses, plant

pytestmark = pytest.mark.slow

REPLICAS = ("--parallel.replicas", "2")
SHARDED = (*REPLICAS, "--parallel.shard_replicas", "true")
SEQUENCES = "--model.width 32 --model.layers 2 --model.heads 4 --model.context 32".split()


@pytest.mark.parametrize("parallelism", ["tensor", "pipeline"])
def test_some_samples_take_another_way_through_the_model(bake: Bake, tmp_path: Path, parallelism: str) -> None:
    """About one sample in a hundred uses ``bias``: in most steps one replica, or none, has a gradient for it."""
    project = bake(parallelism=parallelism)
    seen = tmp_path / "seen"
    plant(
        project,
        "model.py",
        "        self.norm = build_norm(norm, width)\n",
        "self.bias = nn.Parameter(torch.ones(width))",
    )
    edit(
        project,
        "model.py",
        "from torch import Tensor, nn\n",
        "import os\n\nimport torch\nfrom torch import Tensor, nn\n",
    )
    branch = (
        "chosen = (16 * images).flatten(1).sum(1).round().long() % 97 == 0\n"
        "is_real = images.device.type != 'meta'\n"
        "if is_real and self.training:\n"
        f"    open(f'{seen}' + os.environ.get('RANK', ''), 'a').write(f'{{int(chosen.any())}}')\n"
        "if is_real and chosen.any():\n"
        "    return F.silu(self.norm(self.conv(images)) + self.bias[:, None, None] * chosen[:, None, None, None])"
    )
    plant(project, "model.py", "        return F.silu(self.norm(self.conv(images)))\n", branch)
    words = (*SHORT, "--train.max_steps", "8", "--optim.weight_decay", "0.5")
    launch(project, "train", *words, *REPLICAS, "--run.dir", tmp_path / "four", nproc=4)
    chosen = {path.name: path.read_text() for path in tmp_path.glob("seen*")}
    assert len(set(chosen.values())) > 1, f"all replicas take the same way: {chosen}"
    alone(project, "train", *words, "--run.dir", tmp_path / "one")
    assert_close(tmp_path / "four", tmp_path / "one")


def test_a_stage_may_be_frozen(bake: Bake, tmp_path: Path) -> None:
    project = bake(parallelism="pipeline")
    plant(project, "model.py", "    def forward(self, images: Tensor) -> Tensor:\n", "    self.requires_grad_(False)\n")
    words = (*SHORT, "--model.depth", "1", "--parallel.split", "[1, 3]")
    alone(project, "train", *words[:-2], "--run.dir", tmp_path / "one")
    launch(project, "train", *words, "--run.dir", tmp_path / "two")
    assert_close(tmp_path / "two", tmp_path / "one")
    error = launch(
        project, "train", *words, "--train.precision", "fp16", "--run.dir", tmp_path / "fp16", expect=2
    ).stderr
    assert "error: fp16 needs gradients, and this rank's stages are frozen; set train.precision to bf16" in error


def test_a_parameter_that_is_whole_in_a_sharded_module_is_refused(bake: Bake, tmp_path: Path) -> None:
    """Each rank would train it with its own part of the sequence, and the losses would look well."""
    project = bake(parallelism="tensor", task="language")
    plant(
        project,
        "model.py",
        "        self.norm2 = nn.LayerNorm(width)\n",
        "self.scale = nn.Parameter(torch.ones(width))",
    )
    edit(project, "model.py", "x = x + self.out(", "x = x + self.scale * self.out(")
    edit(project, "model.py", "self.out = linear(width, width, std=0.0)", "self.out = linear(width, width)")
    edit(project, "model.py", "from torch import Tensor, nn\n", "import torch\nfrom torch import Tensor, nn\n")
    words = (*SHORT, *SEQUENCES)
    launch(project, "train", *words, "--run.dir", tmp_path / "whole")
    sharded = (*words, "--parallel.sequence_parallel", "true", "--run.dir", tmp_path / "sharded")
    error = launch(project, "train", *sharded, expect=2).stderr
    found = re.findall(
        r"^error: the ranks of a group have different gradients of (.*), which each", error, re.MULTILINE
    )
    assert found == ["block0.scale, block1.scale"], error


def test_gradients_of_which_ranks_have_parts_are_one_message(bake: Bake) -> None:
    words = ("--ranks", "4", *SEQUENCES, "--parallel.sequence_parallel", "true")
    output = launch(bake(parallelism="tensor", task="language"), "plan", *words).stdout
    (rank,) = json.loads(output.splitlines()[-1])["ranks"]
    # The gradients of all norms, and the sum of squares of those of all shards.
    assert [each["messages"] for each in rank["messages"] if each["collective"] == "all_reduce"] == [2]


@pytest.mark.parametrize("parallelism", ["fsdp", "tensor"])
def test_an_average_is_swapped_where_weights_are_gathered(bake: Bake, tmp_path: Path, parallelism: str) -> None:
    """FSDP keeps what it has gathered in an evaluation, which was of the average."""
    project = bake(parallelism=parallelism)
    apply(project / "docs/ema.md", project)
    words = (*SHORT, "--train.eval_every", "2")
    alone(project, "train", *words, "--run.dir", tmp_path / "one")
    layout = SHARDED if parallelism == "tensor" else REPLICAS
    launch(project, "train", *words, *layout, "--run.dir", tmp_path / "four", nproc=4)
    assert len(losses(tmp_path / "four")) == 6
    assert_close(tmp_path / "four", tmp_path / "one")
