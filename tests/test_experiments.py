"""Anybody's experiment in a rendered project: datasets, losses, streams, state and weights of one's own."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHOICES, ONE_STRATEGY, STRATEGIES, Bake, leave_to_weekly, run
from runs import (
    SHORT,
    alone,
    assert_close,
    assert_same_weights,
    edit,
    kill_after,
    launch,
    losses,
    records,
    resume,
    weights,
    world_size,
)
from safetensors.torch import save_file

pytestmark = pytest.mark.slow


def append(project: Path, name: str, code: str) -> None:
    """Add code to a file of the package; a later definition replaces an earlier one."""
    path = next((project / "src").iterdir()) / name
    path.write_text(f"{path.read_text()}\n\n{code}")


# Targets of different lengths, from 1 to the context: what comes after is padding, which the loss ignores.
RAGGED = """
def collate_fn(samples):
    inputs, targets = default_collate(samples)
    for row in targets:
        row[1 + int(row[0]) * 7 % len(row) :] = -100
    longest = int((targets >= 0).sum(dim=1).max())
    return inputs[:, :longest], targets[:, :longest]


def loss_fn(outputs, targets):
    total = F.cross_entropy(outputs.float().flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    weight = (targets >= 0).sum()
    return {"loss": total, "weight": weight.float()}, weight
"""


@pytest.fixture(scope="module")
def ragged(baked: Bake, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that trains on ragged batches and returns the run directory."""
    edited: set[Path] = set()

    def train(parallelism: str, nproc: int, microbatches: int) -> Path:
        project, folder = baked(parallelism=parallelism, task="language"), tmp_path_factory.mktemp("ragged")
        if project not in edited:
            append(project, "dataset.py", RAGGED)
            edited.add(project)
        schedule = ("--parallel.schedule", "GPipe") if parallelism == "pipeline" else ()
        arguments = ("--train.microbatches", str(microbatches), *schedule, "--run.dir", folder)
        launch(project, "train", *SHORT, *arguments, nproc=nproc)
        return folder

    return train


@pytest.fixture(scope="module")
def ragged_reference(ragged: Callable[..., Path]) -> Path:
    """The same in one process and one micro-batch."""
    return ragged("ddp", 1, 1)


@pytest.mark.parametrize("parallelism", STRATEGIES)
def test_padding_does_not_depend_on_the_split(
    ragged: Callable[..., Path], ragged_reference: Path, parallelism: str
) -> None:
    folder = ragged(parallelism, world_size(parallelism, 4), 2)
    assert_close(folder, ragged_reference)
    # A named part of the loss is its mean over the same weight.
    assert [record["weight"] for record in records(folder, "train")] == pytest.approx([1.0] * 6)


RANDOM = """
class Random(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()), random.random(), np.random.rand()], dtype=torch.float64), 0


def build_datasets(config):
    return Random(), Random()
"""
READ = """
import json, sys
import torch
from types import SimpleNamespace
from my_experiment.config import DataConfig
from my_experiment.data import build_train_loader
from my_experiment.dataset import build_datasets

if __name__ == "__main__":
    dp_size, workers, seed, start = map(int, sys.argv[1:])
    samples = []
    for dp_rank in range(dp_size):
        torch.manual_seed(dp_rank)
        strategy = SimpleNamespace(dp_rank=dp_rank, dp_size=dp_size, device=torch.device("cpu"))
        config = DataConfig(global_batch_size=16, num_workers=workers)
        sampler, loader = build_train_loader(build_datasets(None)[0], strategy, config, seed, print, None)
        for epoch in (0, 1):
            sampler.set_epoch(epoch, start)
            samples += [[epoch, *row.tolist()] for inputs, _ in loader for row in inputs]
    print(json.dumps(sorted(samples)))
"""


def test_random_transforms_depend_on_seed_epoch_and_index_alone(bake: Bake, tmp_path: Path) -> None:
    project = bake()
    append(project, "dataset.py", RANDOM)
    script = tmp_path / "read.py"
    script.write_text(READ)

    def read(*arguments: int) -> Any:
        words = map(str, arguments)
        return json.loads(run(sys.executable, script, *words, cwd=project, PYTHONPATH=str(project / "src")).stdout)

    expected = read(1, 0, 7, 0)
    assert len(expected) == 192 and len({tuple(sample[2:]) for sample in expected}) == 192
    assert read(2, 0, 7, 0) == read(1, 1, 7, 0) == read(2, 3, 7, 0) == expected
    assert all(sample in expected for sample in read(2, 1, 7, 32)), "samples differ after a resume in mid-epoch"
    assert read(1, 0, 8, 0) != expected


STREAM = """
from torch.utils.data import IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self, images, length):
        self.images, self.length = images, length

    def __iter__(self):
        worker = get_worker_info()  # As many datasets do, it would divide itself among the loader processes.
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for index in range(first, self.length, step):
            image, label = self.images[index]
            yield image + 0.01 * torch.randn(image.shape), label
"""
SHARDS = """

    def shard(self, num_shards, index):
        part = Stream(self.images, self.length)
        part.__class__ = Shard
        part.first, part.step = index, num_shards
        return part


class Shard(Stream):
    def __iter__(self):
        for index in range(self.first, self.length, self.step):
            yield self.images[index]
"""
# 1,000 samples: 15 global batches per epoch, and an incomplete one.
AS_STREAM = 'return Stream(Digits("train", config.dataset.max_shift), 1000), Digits("test")'
STREAMED = (
    "--train.log_every 1 --checkpoint.every_steps 4 --train.eval_every 1000 --train.epochs 3 --optim.decay_steps 30 "
    "--distributed.device cpu"
).split()


def streaming(project: Path, code: str) -> Path:
    edit(project, "dataset.py", 'return Digits("train", config.dataset.max_shift), Digits("test")', AS_STREAM)
    append(project, "dataset.py", code)
    return project


def test_a_stream_ends_on_all_ranks_and_resumes_on_any_number(bake: Bake, tmp_path: Path) -> None:
    project = streaming(bake(), STREAM)
    for nproc, name in ((1, "one"), (2, "two"), (4, "four")):
        workers = ("--data.num_workers", "2") if nproc == 2 else ()
        launch(project, "train", *STREAMED, *workers, "--run.dir", tmp_path / name, nproc=nproc)
        assert len(losses(tmp_path / name)) == 45
        assert records(tmp_path / name, "eval")[-1]["step"] == 45
        assert_close(tmp_path / name, tmp_path / "one")
    kill_after(21, project, tmp_path / "killed", *STREAMED)
    assert resume(project, tmp_path / "killed", *STREAMED) >= 20  # In the second epoch, or later.
    assert_same_weights(tmp_path / "killed", tmp_path / "two")
    kill_after(21, project, tmp_path / "moved", *STREAMED)
    resume(project, tmp_path / "moved", *STREAMED, nproc=4)
    assert_close(tmp_path / "moved", tmp_path / "one")

    # The last evaluation was interrupted: it is repeated, although no step is left.
    newest = tmp_path / "one/checkpoints/step-00000045.pt"
    content = torch.load(newest, weights_only=True)
    content["progress"]["evaluated_step"] = 0
    torch.save(content, newest)
    launch(project, "train", *STREAMED, "--run.dir", tmp_path / "one", nproc=1)
    assert torch.load(newest, weights_only=True)["progress"]["evaluated_step"] == 45


@pytest.mark.weekly
def test_a_stream_that_splits_itself_ends_together_and_stays_with_its_ranks(bake: Bake, tmp_path: Path) -> None:
    project = streaming(bake(), STREAM + SHARDS)
    # 1,000 samples in two shards of two loader processes: 250 each, which is 7 batches of 32 and a rest.
    arguments = (*STREAMED, "--data.num_workers", "2")
    launch(project, "train", *arguments, "--run.dir", tmp_path / "whole", nproc=2)
    assert len(losses(tmp_path / "whole")) == 42
    kill_after(21, project, tmp_path / "killed", *arguments)
    refused = alone(project, "train", *STREAMED, "--run.dir", tmp_path / "killed", expect=2)
    assert "2 rank(s) with --data.num_workers 2" in refused.stderr
    resume(project, tmp_path / "killed", *arguments)
    assert_same_weights(tmp_path / "killed", tmp_path / "whole")


def test_a_stream_without_a_length_needs_one_for_its_schedule(bake: Bake, tmp_path: Path) -> None:
    project = streaming(bake(), STREAM)
    refused = alone(project, "train", "--run.dir", tmp_path / "run", expect=2)
    assert "set train.max_steps or optim.decay_steps" in refused.stderr


STATE = """
class Count:
    def __init__(self, start):
        self.value = start

    def count(self, *_):
        self.value += 1

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Copies:
    def __init__(self, module):
        self.module = module
        self.tensors = {name: p.detach().clone() for name, p in module.named_parameters()}

    @torch.no_grad()
    def add(self, *_):
        for name, parameter in self.module.named_parameters():
            self.tensors[name] += parameter

    def state_dict(self):
        return self.tensors


plain_build_optimizer = build_optimizer


def build_optimizer(module, config, register):
    optimizer = plain_build_optimizer(module, config, register)
    count, own, copies = Count(0), Count(100 * torch.distributed.get_rank()), Copies(module)
    for hook in (count.count, own.count, copies.add):
        optimizer.register_step_post_hook(hook)
    register("count", count)
    register("own", own, kind="rank")
    register("copies", copies, kind="tensors")
    return optimizer
"""


@pytest.mark.parametrize("parallelism", ONE_STRATEGY)
def test_registered_state_is_saved_and_restored(bake: Bake, tmp_path: Path, parallelism: str) -> None:
    project = bake(parallelism=parallelism)
    append(project, "optim.py", STATE)
    nproc = 1 if parallelism == "data_parallel" else 2
    for steps, kind in (("3", "sharded"), ("6", "full")):
        arguments = ("--train.max_steps", steps, "--checkpoint.format", kind, "--run.dir", tmp_path / "run")
        launch(project, "train", *SHORT, *arguments, nproc=nproc)
    launch(project, "train", *SHORT, "--run.dir", tmp_path / "whole", nproc=nproc)
    content, whole = (
        torch.load(tmp_path / name / "checkpoints/step-00000006.pt", weights_only=True) for name in ("run", "whole")
    )
    assert content["count"] == {"value": 6}
    assert content["own"] == [{"value": 6 + 100 * rank} for rank in range(nproc)]
    assert content["copies"].keys() <= content["model"].keys()
    assert all(torch.equal(content["copies"][name], whole["copies"][name]) for name in whole["copies"])
    assert not torch.equal(content["copies"]["head.linear.weight"], content["model"]["head.linear.weight"])
    converted = tmp_path / "converted.dcp"
    checkpoint = tmp_path / "run/checkpoints/step-00000006.pt"
    launch(project, "convert", "--checkpoint", checkpoint, "--output", converted)
    launch(project, "convert", "--output", tmp_path / "back.pt", "--checkpoint", converted)
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert all(torch.equal(back["copies"][name], content["copies"][name]) for name in content["copies"])


@pytest.fixture(scope="module")
def pretrained(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of six steps."""
    folder = tmp_path_factory.mktemp("pretrained")
    alone(plain, "train", *SHORT, "--run.dir", folder)
    return folder / "checkpoints/step-00000006.pt"


@pytest.mark.parametrize(
    ("parallelism", "kind"),
    leave_to_weekly(
        [
            *((parallelism, "checkpoint") for parallelism in ("ddp", "model_parallel", "tensor", "data_parallel")),
            # What is read does not depend on the strategy.
            *(("fsdp", "state_dict"), ("fsdp", "sharded"), ("pipeline", "safetensors")),
        ],
        [("model_parallel", "checkpoint"), ("tensor", "checkpoint"), ("data_parallel", "checkpoint")],
    ),
)
def test_a_run_starts_from_weights(baked: Bake, pretrained: Path, tmp_path: Path, parallelism: str, kind: str) -> None:
    content = torch.load(pretrained, weights_only=True)["model"]
    file = {"checkpoint": pretrained, "sharded": tmp_path / "w.dcp"}.get(kind, tmp_path / f"weights.{kind}")
    if kind == "state_dict":
        torch.save(content, file)
    elif kind == "safetensors":
        save_file(content, file)
    elif kind == "sharded":
        launch(baked(parallelism=parallelism), "convert", "--checkpoint", pretrained, "--output", file)
    nproc = 1 if parallelism == "data_parallel" else 2
    # Nothing is learned at this rate: the run ends with the weights that it started from.
    arguments = (*SHORT, "--model.weights", file, "--optim.lr", "1e-30", "--run.dir", tmp_path / "run")
    launch(baked(parallelism=parallelism), "train", *arguments, "--train.max_steps", "1", nproc=nproc)
    started = weights(tmp_path / "run")
    assert all(torch.equal(started[name], content[name]) for name in content)
    state = torch.load(tmp_path / "run/checkpoints/step-00000001.pt", weights_only=True)
    assert {float(entry["step"]) for entry in state["optimizer"].values()} == {1.0}
    if file != pretrained:
        file.rename(tmp_path / "gone")  # The same command resumes the run, and no longer needs the weights.
    resumed = launch(baked(parallelism=parallelism), "train", *arguments, nproc=nproc)
    assert "step 1 of 6" in resumed.stdout


def test_weights_that_do_not_fit_are_refused_in_one_line(plain: Path, pretrained: Path, tmp_path: Path) -> None:
    content = torch.load(pretrained, weights_only=True)["model"]
    content["extra.weight"] = content.pop("head.linear.bias")
    content["head.linear.weight"] = torch.zeros(3, 64)
    file = tmp_path / "weights.pt"
    torch.save(content, file)
    arguments = (*SHORT, "--model.weights", file, "--run.dir", tmp_path / "run")
    refused = alone(plain, "train", *arguments, expect=2)
    line = "missing: head.linear.bias; unexpected: extra.weight; of another shape: head.linear.weight"
    assert line in refused.stderr and refused.stderr.count("\n") == 1
    refused = alone(plain, "train", *arguments, "--model.weights_except", "[head]", expect=2)
    assert "unexpected: extra.weight;" in refused.stderr
    del content["extra.weight"]
    torch.save(content, file)
    alone(plain, "train", *arguments, "--model.weights_except", "[head]")
    other = (*SHORT, "--model.weights", pretrained, "--run.dir", tmp_path / "run")
    assert "did not start from model.weights" in alone(plain, "train", *other, expect=2).stderr
    refused = alone(
        plain, "train", *arguments, "--run.dir", tmp_path / "b", "--model.weights_except", "[hed]", expect=2
    )
    assert "the model has no hed" in refused.stderr
    for broken in (b"", b"no weights", file.read_bytes()[:5000]):
        file.write_bytes(broken)
        refused = alone(plain, "train", *arguments, "--run.dir", tmp_path / "c", expect=2)
        assert "which cannot be read" in refused.stderr and refused.stderr.count("\n") == 1
    refused = launch(
        plain, "train", *SHORT, "--model.weights", tmp_path / "nowhere", "--run.dir", tmp_path / "d", expect=2
    )
    assert "no such file" in refused.stderr and not (tmp_path / "d").exists()


# Weights of a model that uses one parameter twice: the file holds it once.
TIED = """
import sys
from pathlib import Path
import torch
from safetensors.torch import save_model
from torch import nn
from my_experiment.checkpoint import load_weights
from my_experiment.config import DistributedConfig
from my_experiment.runtime import process_group
one, other = (nn.ModuleDict({"embedding": nn.Linear(3, 3), "head": nn.Linear(3, 3)}) for _ in range(2))
one.head.weight, other.head.weight = one.embedding.weight, other.embedding.weight
save_model(one, sys.argv[1])
with process_group(DistributedConfig(), devices_per_rank=1) as process:
    load_weights(Path(sys.argv[1]), [], other, process.device)
print(all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items()))
"""


def test_tied_weights_are_loaded(plain: Path, tmp_path: Path) -> None:
    words = (sys.executable, "-c", TIED, tmp_path / "tied.safetensors")
    assert run(*words, cwd=plain, PYTHONPATH="src").stdout.splitlines()[-1] == "True"


# State that could be saved, but not restored: each is refused before it is lost.
UNFIT = """
import sys
import numpy, torch
from torch import nn
from types import SimpleNamespace
from my_experiment.checkpoint import Checkpointer, Progress
from my_experiment.config import CheckpointConfig, DistributedConfig, UserError
from my_experiment.runtime import process_group
from pathlib import Path

def stateful(make):
    return SimpleNamespace(state_dict=make, load_state_dict=print)

def attempt(action, *words, **options):
    try:
        action(*words, **options)
    except (ValueError, UserError) as error:
        print(error)

with process_group(DistributedConfig(), devices_per_rank=1) as process:
    module, tensor = nn.Linear(2, 2), torch.zeros(2)
    checkpointer = Checkpointer(module, {"model": {"weights": None}}, Path(sys.argv[1]), CheckpointConfig(), process)
    attempt(checkpointer.register, "kept", stateful(lambda: {"weight": tensor}), "tensors")
    attempt(checkpointer.register, "cloned", stateful(lambda: {"weight": tensor.clone()}), "tensors")
    attempt(checkpointer.register, "kept", stateful(dict))
    checkpointer.register("buffer", stateful(lambda: {"samples": numpy.zeros(3)}), "rank")
    checkpointer.restore([])
    attempt(checkpointer.register, "late", stateful(dict))
    attempt(checkpointer.save, Progress())
"""


def test_state_that_could_not_be_restored_is_refused(plain: Path, tmp_path: Path) -> None:
    printed = run(sys.executable, "-c", UNFIT, tmp_path, cwd=plain, PYTHONPATH="src").stdout.splitlines()
    expected = [
        "'cloned' returns copies",
        "'kept' is not a free name",
        "'late' is registered too late",
        "numpy.ndarray",
    ]
    assert len(printed) == len(expected)
    assert all(words in line for words, line in zip(expected, printed, strict=True)), printed


NO_SEQUENCE = """
class Branches(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.left, self.right = nn.Linear(64, width), nn.Linear(64, width)
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        x = images.flatten(1)
        return self.head(F.silu(self.left(x)) * self.right(x))


def build_model(config):
    return Branches(config.width)
"""


@pytest.mark.parametrize("parallelism", CHOICES["parallelism"])
def test_a_strategy_takes_any_model_or_says_what_it_needs(bake: Bake, tmp_path: Path, parallelism: str) -> None:
    project = bake(parallelism=parallelism)
    append(project, "model.py", NO_SEQUENCE)
    needs = {
        "model_parallel": "return an nn.Sequential",
        "pipeline": "return an nn.Sequential",
        "tensor": "a method tensor_plan",
    }
    if parallelism in needs:
        refused = alone(project, "train", *SHORT, "--run.dir", tmp_path / "run", expect=2)
        assert refused.stderr.startswith("error: ") and refused.stderr.count("\n") == 1
        assert "Branches" in refused.stderr and needs[parallelism] in refused.stderr
        return
    launch(project, "train", *SHORT, "--run.dir", tmp_path / "run", nproc=1 if parallelism == "data_parallel" else 2)
    alone(project, "train", *SHORT, "--run.dir", tmp_path / "alone")
    assert_close(tmp_path / "run", tmp_path / "alone")


# A fault in the experiment (file, line, and the line with the fault), and the words that explain it.
FAULTS = {
    "depends on global state": (
        "dataset.py",
        "        return self.images[index, None",
        "        self.labels[index] ^= 1\n        return self.images[index, None",
    ),
    "depends on the other samples of its batch": (
        "config.py",
        'norm: Literal["group", "batch"] = "group"',
        'norm: Literal["group", "batch"] = "batch"',
    ),
    "the loss does not depend on narrow0.spare.weight": (
        "model.py",
        "        nn.init.zeros_(self.norm2.weight)",
        "        nn.init.zeros_(self.norm2.weight)\n        self.spare = nn.Linear(2, 2)",
    ),
    "is not the sum over its parts": ("dataset.py", 'reduction="sum")', 'reduction="mean")'),
}


@pytest.mark.parametrize("words", FAULTS)
def test_a_broken_experiment_is_explained_in_words(bake: Bake, words: str) -> None:
    project = bake()
    edit(project, *FAULTS[words])
    failed = run(sys.executable, "-m", "pytest", "-q", "tests/test_experiment.py", cwd=project, expect=1)
    assert words in failed.stdout and re.search(r"^[12] failed", failed.stdout, re.MULTILINE), failed.stdout
