"""What people reported of other tools: it is right here, or refused in one line before it costs a run."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path, PurePosixPath
from shutil import copytree
from signal import SIGINT, SIGKILL, SIGTERM
from typing import Any

import pytest
import torch
from conftest import (
    BIN,
    CHOICES,
    TEMPLATE,
    Bake,
    edit,
    find_processes,
    free_ports,
    launch,
    read_losses,
    read_records,
    run,
    run_alone,
    run_python,
    started,
    wait_until,
    weekly,
)
from ranks import FAULTS, measure
from safetensors.torch import load_file

pytestmark = [pytest.mark.long, pytest.mark.independent]

Changes = dict[tuple[str, str], str]

SMALL = "train --train.max_steps 4 --train.log_every 1 --data.global_batch_size 32 --distributed.device cpu".split()
WORKERS = ["--data.num_workers", "1"]
SHARDED = ["--checkpoint.format", "sharded"]
# Lines of the default project.
STEM = ("model.py", "        self.norm = nn.GroupNorm(ModelConfig.groups, width)\n")
FORWARD = ("model.py", "    def forward(self, images: Tensor) -> Tensor:\n")
LOADED = ("dataset.py", "        self.max_shift = max_shift\n")
SAMPLE = ("dataset.py", "        row = random.randrange(")
PAIR = (
    "dataset.py",
    "image = self.images[index, None, row : row + 8, column : column + 8]\n        return image, self.labels[index]",
)
COLLATED = ("dataset.py", "collate_fn = default_collate\n")
BUILT = ("dataset.py", 'return train_set, validation_set, Digits("test")')
TASK = (
    "task.py",
    '        """Build what the losses need, such as a teacher, which is then frozen in eval mode."""\n',
)
HEAD = ("model.py", "        self.linear = nn.Linear(width, CLASSES)\n")
POOLED = ("model.py", "        return self.linear(features.mean(dim=(2, 3)))\n")
BUILD = ("model.py", "    return nn.Sequential(blocks)\n")
PREPARE = ' such as a teacher\'s outputs."""\n'
PREPARED = ("task.py", PREPARE + "        return inputs, targets\n")
AUGMENTED = ("task.py", 'evaluation skips this."""\n        return inputs, targets\n')
WEIGHT = ("task.py", "        return len(targets)\n")
LOSSES = ("task.py", '        return {"loss": F.cross_entropy(outputs.float(), targets, reduction="sum")}\n')
MEASURED = ("task.py", '        losses = F.cross_entropy(outputs.float(), targets, reduction="none")\n')
OPTIMIZER = (
    "optim.py",
    "AdamW(\n        groups,\n        lr=config.lr,\n        betas=config.betas,\n        eps=config.eps,\n"
    "        fused=not is_cpu,\n        foreach=is_cpu,\n    )",
)
IMPORTED = {("model.py", "from torch import Tensor, nn\n"): "import torch\nfrom torch import Tensor, nn\n"}
METRICS, ACCURACY = ("task.py", 'return {"loss": losses,'), ("task.py", ' "accuracy": correct.mean(),')


def add(line: tuple[str, str], text: str) -> Changes:
    """Return an edit that adds something after a line."""
    return {line: line[1] + text}


@pytest.mark.parametrize("fault", ["SIGKILL", *weekly(*(each for each in FAULTS if each != "SIGKILL"))])
def test_a_failure_of_many_ranks_is_short(bake: Bake, fault: str) -> None:
    lines, requests, most = measure(bake(), 8, fault)
    assert 0 < lines <= 10 + (fault == "error") * 25  # A traceback.
    assert 0 < requests <= 40 * 8 and most["descriptors"] < 64 + 8


@pytest.mark.weekly
def test_a_rank_that_hangs_is_named_by_all_groups_of_a_mesh(bake: Bake) -> None:
    project, zeroed = bake(parallelism="fsdp"), ("train.py", "        self.optimizer.zero_grad()\n")
    hangs = "        if self.step == 2 and self.process.rank == 3:\n            time.sleep(1e6)\n"
    edit(project, add(zeroed, hangs))
    words = ("--parallel.replicas", "2", "--train.exact", "false", "--distributed.timeout_seconds", "8")
    err = launch(project, *SMALL, *words, nproc=4, code=1, STOP_SECONDS="3").stderr
    assert "no report from rank(s) 3" in err, err


def refuse(project: Path, *words: str, nproc: int = 1) -> str:
    """Train with a mistake, which is refused in one line; returns it. One of rank 1 alone is repeated by rank 0."""
    words = (*SMALL, "--run.dir", "run", *words)
    result = launch(project, *words, nproc=nproc, code=2) if nproc > 1 else run_alone(project, *words, code=2)
    line, *others = result.stderr.splitlines(keepends=True)
    repeated = line.replace("error: ", "error: rank 0 waited in vain: rank 1 failed with UserError: ", 1)
    assert line.startswith("error: ") and others in ([], [repeated]), result.stderr
    return line


BELOW_A_FILE = "--run.dir=README.md/run"
MISTAKES: list[tuple[bytes, list[str], str]] = [  # A file of settings, words of the command line, what is named.
    (b"optim: 3", [], "optim in "),
    (b"optim: [{lr: 1}]", [], "optim in "),
    (b"optim.lr: 1", [], "optim.lr in "),
    (b"- optim", [], "mine.yaml"),
    (b"optim:\n\tlr: 1", [], 'mine.yaml", line 2'),
    (b"optim:\n  lr: \0", [], "mine.yaml"),
    (b"optim:\n  lr: \xff", [], "mine.yaml"),
    (b"optim: &a\n  lr: *a", [], "optim.lr"),
    (b"optim:\n  betas: null", [], "optim.betas"),
    (b"optim:\n  lr: .nan", [], "optim.lr"),
    (b"optim:\n  lr: 1\n  lr: 1", [], "lr is given twice in optim"),
    (b"optim: " + b"{a: " * 3000 + b"}" * 3000, [], "recursion"),
    (b"", ["--optim.betas", '[0.9, "x"]'], "optim.betas"),
    (b"", ["--data.eval_batch_size", "1" + "0" * 30], "data.eval_batch_size"),
    (b"", ["--data.num_workers", "1000000000"], "data.num_workers"),
    (b"", ["--distributed.timeout_seconds", "1e15"], "distributed.timeout_seconds"),
    (b"", ["--run.dir="], "run.dir"),
    (b"", ["--run.dir=README.md"], "run.dir"),
    (b"", [BELOW_A_FILE], "run.dir"),
]


def test_mistakes_in_settings_are_named_before_pytorch_is_imported(bake: Bake) -> None:
    project = bake()
    (project / "torch.py").write_text("raise SystemExit('PyTorch was imported')")  # The current folder comes first.
    words_of_file = ("train", "--config", "mine.yaml")
    (project / "mine.yaml").write_text("optim:\n  lr: 1e-3\n")
    assert "PyTorch was imported" in run_alone(project, *words_of_file, code=1).stderr
    for content, words, named in MISTAKES:
        (project / "mine.yaml").write_bytes(content)
        err = run_alone(project, *words_of_file, *words, code=2).stderr
        assert err.startswith("error: ") and err.count("\n") == 1 and named in err, (content, words, err)


def test_what_this_machine_cannot_do_is_refused(bake: Bake) -> None:
    project = bake()
    assert "run.dir is README.md/run, but " in refuse(project, BELOW_A_FILE, nproc=2)
    err = launch(project, "train", "--distributed.backend=nccl", "--distributed.device=cpu", nproc=1, code=2).stderr
    assert re.match("error: .*(have NCCL|no GPUs)", err) and "Traceback" not in err, err
    run_alone(project, "--preflight", "train", BELOW_A_FILE, NODE_RANK="1")
    run_alone(project, "--preflight", "evaluate", BELOW_A_FILE, "--checkpoint", "README.md")


@pytest.mark.parametrize("content", ["", "# Nothing yet.\n", "---\n", "{}\n"])
def test_a_file_without_settings_means_the_defaults(bake: Bake, content: str) -> None:
    project = bake("[a] folder*")  # Which is no pattern.
    words = ["train", "--print_config"]
    assert "lr: 0.004" in run_alone(project, *words).stdout
    (project / "mine.yaml").write_text(content)
    assert "lr: 0.001" in run_alone(project, *words, "--config", "mine.yaml").stdout


def load(run_dir: Path) -> dict[str, Any]:
    """Return the newest checkpoint."""
    content: dict[str, Any] = torch.load(sorted(run_dir.glob("checkpoints/*.pt"))[-1], weights_only=True)
    return content


EXPANDED = add(STEM, "        self.register_buffer('scale', self.norm.weight.detach()[:1].expand(4))\n")
LAMBDA = add(LOADED, "        self.crop = lambda image: image\n")
NO_PLAN = {("plan.py", "isinstance(block, Head)"): "not isinstance(block, nn.Module)"}
BATCH_NORM = {STEM: "        self.norm = nn.BatchNorm2d(width)\n"}


@pytest.mark.parametrize(
    ("parallelism", "changes", "words", "named"),
    [
        ("ddp", LAMBDA, WORKERS, "pickle local object 'Digits.__init__.<locals>.<lambda>'"),
        ("ddp", BATCH_NORM, ["--train.activation_checkpointing", "true"], "BatchNorm"),
        ("fsdp", EXPANDED, [], "buffer scale cannot be loaded"),
        (
            "tensor",
            {},
            ["--parallel.tensor=3"],
            "parallel.replicas x parallel.tensor is 1 x 3, which does not divide 2",
        ),
        ("tensor", NO_PLAN, [], "plan.py shards no layer"),
        ("mesh", {}, ["--parallel.tensor=3"], "parallel.pipeline x tensor x replicas has to divide"),
        *weekly(
            ("ddp", add(LOADED, "        self.file = open(__file__)\n"), WORKERS, "cannot pickle '_io.TextIOWrapper'"),
            *((strategy, EXPANDED, [], "buffer scale cannot be loaded") for strategy in ("tensor", "pipeline")),
            (
                "pipeline",
                {},
                ["--parallel.replicas=3"],
                "parallel.pipeline x parallel.replicas is 1 x 3, which does not",
            ),
        ),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_step(
    bake: Bake, parallelism: str, changes: Changes, words: list[str], named: str
) -> None:
    project = bake(parallelism=parallelism)
    edit(project, changes)
    # The launcher checks settings, and shows no warning of Python about what a loader process leaves.
    assert named in refuse(project, *words, nproc=2 if words else 1)
    assert not read_records(project / "run", "train")


def test_a_mistake_that_a_loader_process_finds_is_one_line(bake: Bake) -> None:
    """The error that PyTorch passes on has the traceback of the process as its message."""
    project = bake()
    labels = ("dataset.py", "        return image, self.labels[index]\n")
    edit(project, {("dataset.py", "from .config import Config\n"): "from .config import Config, UserError\n"})
    edit(project, {labels: "        raise UserError(f'image {index} has no label')\n"})
    err = launch(project, *SMALL, *WORKERS, "--run.dir", "run", code=1).stderr
    assert re.search(r"^error: image \d+ has no label$", err, re.MULTILINE), err


DROPPED = ("model.py", "        self.up = linear(width, 4 * width)\n")


@pytest.mark.weekly
def test_dropout_that_all_shards_would_share_is_refused(bake: Bake) -> None:
    project = bake(parallelism="tensor", task="language")
    edit(project, add(DROPPED, "        self.dropout = nn.Dropout(0.0)\n"))
    launch(project, *SMALL, "--run.dir", "run")
    edit(project, {("model.py", "nn.Dropout(0.0)"): "nn.Dropout(0.1)"})
    assert "nn.Dropout drops the same places of all shards" in refuse(project, nproc=2)


# mosaicml/composer#1906 (texts) and hpcaitech/ColossalAI#4489 (a class of one's own): each micro-batch would get all.
TEXTS = {
    PAIR: PAIR[1].replace("self.labels[index]", "str(int(self.labels[index]))"),
    LOSSES: LOSSES[1].replace(
        "targets,", "torch.tensor([int(target) for target, _ in zip(targets, outputs, strict=False)]),"
    ),
    MEASURED: "        targets = torch.tensor([int(target) for target in targets])\n" + MEASURED[1],
}
OBJECT = {
    COLLATED: "class Batch:\n    def __init__(self, samples):\n"
    "        self.images, self.labels = default_collate(samples)\n\n    def __len__(self):\n"
    "        return len(self.labels)\n\n\ndef collate_fn(samples):\n    return (Batch(samples),) * 2\n",
    FORWARD: FORWARD[1] + "        images = images.images\n",
    LOSSES: LOSSES[1].replace("targets,", "targets.labels,"),
    MEASURED: "        targets = targets.labels\n" + MEASURED[1],
}


@pytest.mark.weekly
@pytest.mark.parametrize("changes", [TEXTS, OBJECT])
def test_micro_batches_may_be_of_any_kind(bake: Bake, changes: Changes) -> None:
    project = bake()
    edit(project, changes)
    for size in ("8", "16"):
        run_alone(project, *SMALL, "--data.micro_batch_size", size, "--run.dir", size)
    assert read_losses(project / "8") == pytest.approx(read_losses(project / "16"), rel=1e-5)


@pytest.mark.parametrize("parallelism", ["ddp", *weekly("fsdp", "tensor", "pipeline")])
def test_an_optimizer_without_state_resumes(bake: Bake, parallelism: str) -> None:
    project = bake(parallelism=parallelism)  # pytorch#133415.
    edit(project, {OPTIMIZER: "SGD(groups, lr=config.lr)"})
    run_alone(project, *SMALL, "--run.dir", "straight")
    for steps in ("2", "4"):
        run_alone(project, *SMALL, "--run.dir", "run", "--train.max_steps", steps)
    assert read_losses(project / "run") == read_losses(project / "straight")


GROUPS = ("optim.py", '        groups.append({"params": parameters, "weight_decay": weight_decay})\n')


RATES = """
import sys
from my_experiment.__main__ import parse
from my_experiment.distributed import cleanup, rendezvous, setup
from my_experiment.train import Trainer
_, config, _ = parse(["train", *sys.argv[1:]])
setup(config, process := rendezvous(config))
trainer = Trainer(config, process)
trainer.run()
print(*(group["lr"] for group in trainer.optimizer.param_groups))
cleanup(process)
"""


def test_a_group_keeps_its_share_of_the_learning_rate(bake: Bake) -> None:
    project = bake()
    edit(project, add(GROUPS, '    groups[0]["lr"] = config.lr / 2\n'))
    last = {}
    for steps in ("2", "4"):  # The second start resumes.
        words = [*SMALL[1:], "--run.dir", "run", "--train.max_steps", steps]
        last[steps] = [float(word) for word in run_python(project, RATES, *words).splitlines()[-1].split()]
        assert last[steps][0] == pytest.approx(last[steps][1] / 2)
    assert last["2"][0] < last["4"][0] < load(project / "run")["config"]["optim"]["lr"] / 2  # They warm up.


@pytest.mark.parametrize("late", [False, True])
def test_a_parameter_that_the_optimizer_lacks_is_named_before_it_is_saved(bake: Bake, late: bool) -> None:
    project = bake()
    if late:
        build = {BUILD: f"    blocks['stem'].requires_grad_(False)\n{BUILD[1]}"}
        stem = "self.parallel.module.stem.requires_grad_(True).parameters()"
        thaw = f"        if self.step == 2:\n            self.optimizer.add_param_group({{'params': [*{stem}]}})\n"
        edit(project, build | add(("train.py", "        self.optimizer.zero_grad()\n"), thaw))
    else:
        edit(project, {("optim.py", "if parameter.requires_grad:"): "if parameter.dim() > 1:"})
    assert (
        f"step 4 is not saved: stem.{'conv' if late else 'norm'}.weight is trained, but the optimizer lacked it"
        in refuse(project)
    )


NORMS = {
    ("model.py", "        self.qkv = linear(width, 3 * width)\n"): "        self.qkv = linear(width, 3 * width)\n"
    "        self.norms = nn.ModuleList(nn.RMSNorm(width // heads) for _ in range(2))\n",
    (
        "model.py",
        "        attended = F.scaled_dot_product_attention(queries,",
    ): "        queries, keys = self.norms[0](queries), self.norms[1](keys)\n"
    "        attended = F.scaled_dot_product_attention(queries,",
}
PLANNED = {
    ("plan.py", "    RowwiseParallel,\n"): "    RowwiseParallel,\n    SequenceParallel,\n",
    (
        "plan.py",
        '{"qkv": columns,',
    ): '{"norms.*": SequenceParallel(use_local_output=True), "qkv": columns,',
}


@pytest.mark.weekly
@pytest.mark.parametrize("parallelism", ["tensor", "mesh"])
def test_a_parameter_that_works_on_shards_is_in_the_plan_or_refused(bake: Bake, parallelism: str) -> None:
    project = bake(parallelism=parallelism, task="language")
    edit(project, NORMS)
    words = ["--parallel.tensor", "2", "--optim.warmup_steps", "0"]
    assert "copies of block0.norms.0.weight drift apart" in refuse(project, *words, nproc=2)
    edit(project, PLANNED)
    for nproc in (1, 2):
        launch(project, *SMALL, *(words if nproc > 1 else words[2:]), "--run.dir", f"run{nproc}", nproc=nproc)
    for one, two in zip(*(read_records(project / f"run{nproc}", "train") for nproc in (1, 2)), strict=True):
        # Not the weights: AdamW makes a whole step of a gradient that is rounding alone.
        assert [one["loss"], one["grad_norm"]] == pytest.approx([two["loss"], two["grad_norm"]], rel=1e-5)


@pytest.mark.weekly
def test_weights_that_a_run_started_from_may_be_gone(bake: Bake) -> None:
    project = bake()
    run_alone(project, *SMALL, "--run.dir", "first")
    (project / "first" / "checkpoints" / "step-00000004.pt").rename(project / "weights.pt")
    run_alone(project, *SMALL, "--run.dir", "run", "--train.max_steps", "2", "--model.weights", "weights.pt")
    (project / "weights.pt").unlink()
    assert "step 2 of 4" in run_alone(project, *SMALL, "--run.dir", "run").stdout


@pytest.mark.parametrize("form", ["sharded", *weekly("full")])
def test_a_run_that_fails_ends_a_save_of_its_own_and_waits_for_no_other(bake: Bake, form: str) -> None:
    project = bake(parallelism="fsdp")
    if form == "full":
        write, slow = (
            ("checkpoint.py", "        files.write_atomically(path, lambda"),
            "        __import__('time').sleep(12)\n",
        )
    else:
        write, slow = (
            ("sharded.py", "            dcp.save("),
            "            __import__('time').sleep(1e4 * self.process.rank)\n",
        )
    edit(project, {write: slow + write[1]})
    fails = "        if self.step == 2 and self.process.rank == 0:\n            raise ValueError('a bad sample')\n"
    edit(project, add(("train.py", "        self.optimizer.zero_grad()\n"), fails))
    words = ["--checkpoint.format", form, "--checkpoint.every_steps", "2", "--run.dir", "run"]
    words += ["--distributed.timeout_seconds", "8"]  # Shorter than the write.
    err = launch(project, *SMALL, *words, code=1).stderr
    assert "ValueError: a bad sample" in err and "no report" not in err, err
    assert (project / "run/checkpoints/step-00000002.pt").exists() == (form == "full")


@pytest.mark.weekly
def test_a_sharded_run_is_evaluated_without_a_full_checkpoint(bake: Bake) -> None:
    project = bake(parallelism="fsdp")
    launch(project, *SMALL, *SHARDED, "--run.dir", "run")
    words = ["evaluate", "--distributed.device", "cpu", "--checkpoint"]
    outputs = {run_alone(project, *words, path).stdout for path in ("run", "run/checkpoints/step-00000004.dcp")}
    assert len(outputs) == 1


@pytest.mark.weekly
def test_several_teachers_are_frozen_and_in_eval_mode(bake: Bake) -> None:
    project = bake()  # facebookresearch/unbiased-teacher#47.
    teacher = "torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10), torch.nn.BatchNorm1d(10))"
    edit(project, add(TASK, f"        self.teachers = [{teacher} for _ in range(2)]\n"))
    edit(
        project,
        {PREPARED: PREPARE + "        return inputs, (targets, sum(teacher(inputs) for teacher in self.teachers))\n"},
    )
    edit(
        project,
        {LOSSES: LOSSES[1].replace("targets,", "targets[0],")[:-2] + " + (outputs - targets[1]).square().sum()}\n"},
    )
    edit(
        project, {WEIGHT: "        return len(targets[0])\n", MEASURED: "        targets, _ = targets\n" + MEASURED[1]}
    )
    for nproc in (1, 2):
        launch(project, *SMALL, "--run.dir", f"run{nproc}", nproc=nproc)
    assert read_losses(project / "run1") == pytest.approx(read_losses(project / "run2"), rel=1e-5)


# What is sent or read has the layout of the sender; and a hook of the whole model gets its inputs.
HOOK = "    model.register_forward_pre_hook(lambda model, inputs: (inputs[0] / 2,))\n    return model\n"
LAYOUTS = {
    "channels_last": {BUILD: f"    model = nn.Sequential(blocks).to(memory_format=torch.channels_last)\n{HOOK}"},
    "transposed": add(HEAD, "        self.linear.weight = nn.Parameter(torch.randn(width, CLASSES).div(9).t())\n"),
    "buffer": add(STEM, "        scale = torch.rand(1, 4, 8, 8).to(memory_format=torch.channels_last)\n")
    | {FORWARD: FORWARD[1] + "        images = images + self.scale[:, :1] - self.scale[:, 1:2]\n"},
}
LAYOUTS["buffer"][STEM] += "        self.register_buffer('scale', scale)\n"


@pytest.mark.weekly
@pytest.mark.parametrize("layout", ["channels_last", "transposed", "buffer"])
def test_tensors_of_any_layout_resume_and_evaluate(bake: Bake, layout: str) -> None:
    project = bake()
    edit(project, IMPORTED | LAYOUTS[layout])
    launch(project, *SMALL, "--run.dir", "straight")
    for steps in ("2", "4"):
        launch(project, *SMALL, "--run.dir", "run", "--train.max_steps", steps)
    assert read_losses(project / "run") == pytest.approx(read_losses(project / "straight"), rel=1e-6)
    evaluate = ["evaluate", "--distributed.device", "cpu", "--checkpoint"]
    evaluated = [
        json.loads(launch(project, *evaluate, f"{folder}/checkpoints/step-00000004.pt", nproc=nproc).stdout)["loss"]
        for folder, nproc in (("straight", 1), ("straight", 2), ("run", 2))
    ]
    assert evaluated == pytest.approx(evaluated[:1] * 3, rel=1e-6)
    validated = [read_records(project / folder, "eval")[-1]["loss"] for folder in ("straight", "run")]
    assert validated[0] == pytest.approx(validated[1], rel=1e-6)


SQUARES = '        squares = outputs.square().sum()\n        F.calls = getattr(F, "calls", 0) + 1\n'
TWO = LOSSES[1].strip()[len("return ") : -1] + ', "squares": squares}'
RANK = 'int(__import__("os").environ["RANK"])'


def test_losses_are_averaged_by_name(bake: Bake) -> None:
    project = bake()
    edit(project, {LOSSES: SQUARES + f"        losses = {TWO}\n        return losses\n"})
    launch(project, *SMALL, "--run.dir", "straight")
    # In another order on the other rank, and in every other step.
    turned = f"dict(list(losses.items())[:: 1 if (F.calls + {RANK}) % 2 else -1])"
    edit(project, {("task.py", "        return losses\n"): f"        return {turned}\n"})
    launch(project, *SMALL, "--run.dir", "run")
    runs = [read_records(project / folder, "train") for folder in ("straight", "run")]
    for name in ("loss", "squares", "grad_norm"):
        first, second = ([record[name] for record in records] for records in runs)
        assert first == second and len(first) == 4


@pytest.mark.parametrize(
    ("losses", "named"),
    [
        (f'{{"loss": squares}} | ({{"other": squares}} if {RANK} else {{}})', "only some micro-batches have ['loss'"),
        ('{"nll": squares}', "Task.losses returns {'nll': tensor("),
        ("squares", "; return a dictionary with `loss`"),
        ('{"loss": squares, "step": squares}', "two of these have one name: ['event', 'step',"),
        (f'{{"loss": squares * [torch.inf, -torch.inf][{RANK}]}}', "inf in fsum"),
        *weekly(
            ('{"loss": squares} | ({"other": squares} if F.calls > 1 else {})', "only some micro-batches have ['loss'"),
            ("{}", "Task.losses returns {}"),
            ("[squares]", "Task.losses returns [tensor("),
            ('{"loss": squares, "lr": squares}', "two of these have one name: ['event', 'step',"),
            ('{"loss": squares, "grad_norm": squares}', "'grad_norm': tensor("),
        ),
    ],
)
def test_losses_that_cannot_be_averaged_or_recorded_are_named(bake: Bake, losses: str, named: str) -> None:
    project, ranks = bake(), 2 if "other" in losses or "inf" in losses else 1
    edit(project, {LOSSES: SQUARES + f"        return {losses}\n"})
    assert named in refuse(project, "--train.log_every", str(ranks), nproc=ranks)
    assert not list((project / "run").glob("checkpoints/*.pt"))


def test_a_weight_that_is_no_number_on_one_rank_ends_the_run(bake: Bake) -> None:
    project = bake()
    edit(project, {WEIGHT: f"        return torch.tensor([len(targets), torch.nan][{RANK}])\n"})
    assert "'loss': nan" in refuse(project, nproc=2)


@pytest.mark.weekly
def test_a_frozen_parameter_may_be_infinite(bake: Bake) -> None:
    project = bake()
    mask = "nn.Parameter(torch.full((CLASSES,), -torch.inf), requires_grad=False)"
    edit(project, IMPORTED | {HEAD: f"{HEAD[1]}        self.mask = {mask}\n"})
    run_alone(project, *SMALL, "--run.dir", "run")
    assert load(project / "run")["model"]["head.mask"].isinf().all()


@pytest.mark.weekly
def test_a_negative_weight_counts_as_on_one_rank(bake: Bake) -> None:
    project = bake()
    edit(project, {WEIGHT: "        return len(targets) - 24 * (targets[0] % 2)\n"})
    for nproc in (1, 2):
        launch(project, *SMALL, "--data.micro_batch_size", "8", "--run.dir", f"run{nproc}", nproc=nproc)
    assert read_losses(project / "run1") == read_losses(project / "run2")


@pytest.mark.weekly
def test_samples_of_several_sizes_need_no_padding(bake: Bake) -> None:
    project = bake()
    words = [*SMALL, "--data.micro_batch_size", "8", "--run.dir"]
    run_alone(project, *words, "without")
    boxes = "[torch.ones(3 + index % 2, 4) for index in range(len(samples))]"
    collate = f"def collate_fn(samples):\n    images, labels = default_collate(samples)\n    boxes = {boxes}\n"
    edit(project, {COLLATED: collate + "    return images, (labels, boxes)\n"})
    edit(project, {LOSSES: LOSSES[1].replace("targets,", "targets[0],"), WEIGHT: "        return len(targets[0])\n"})
    edit(project, {MEASURED: "        targets, _ = targets\n" + MEASURED[1]})
    run_alone(project, *words, "run")
    assert read_losses(project / "run") == read_losses(project / "without")


EXTRA = "        self.extra = nn.Parameter(torch.ones(4, 1, 1), requires_grad={})\n"
USED = '"USED" in __import__("os").environ'


@pytest.mark.parametrize(
    ("before", "parallelism", "words"),
    [
        ("frozen", "ddp", []),
        *weekly(
            ("unused", "ddp", []),
            ("unused", "fsdp", SHARDED),
            ("frozen", "fsdp", SHARDED),
            ("frozen", "fsdp", []),
            ("unused", "fsdp", []),
        ),
    ],
)
def test_a_parameter_that_had_no_gradient_trains_after_a_resume(
    bake: Bake, before: str, parallelism: str, words: list[str]
) -> None:
    project = bake(parallelism=parallelism)
    edit(project, IMPORTED | add(STEM, EXTRA.format(USED if before == "frozen" else "True")))
    edit(project, add(FORWARD, f"        images = images * (self.extra.mean() if {USED} else 1)\n"))
    often = [*SMALL, *words, "--train.allow_unused", "true", "--run.dir", "run", "--train.max_steps"]
    train = run_alone if parallelism == "ddp" else launch
    train(project, *often, "2")
    train(project, *often, "4", USED="1")
    if words:
        train(project, *often, "5", "--checkpoint.format", "full", USED="1")
    assert len(read_losses(project / "run")) == (5 if words else 4)
    saved = load(project / "run")["optimizer"]["state"]
    taken = {name: int(state["step"]) for name, state in saved.items()}
    assert taken.pop("stem.extra") == (3 if words else 2) and {*taken.values()} == {5 if words else 4}


DICT = """default_collate


def collate_fn(samples):
    return dict(zip(["image", "label"], default_collate(samples)))
"""
STEP = ("train.py", "        microbatches = []\n")
FREEZE = "        self.parallel.module.stem.conv.weight.requires_grad_(self.step < 2)\n"
STREAM = """class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(Digits("train"))

    return Stream(), Digits("test"), Digits("test")"""


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {BUILT: BUILT[1].replace('Digits("test")', 'Subset(Digits("test"), [])')},
            "the datasets have [[1200, 237, 0]] samples",
        ),
        ({BUILT: STREAM}, "object of type 'Stream' has no len()"),
        ({STEP: STEP[1] + FREEZE}, "the loss does not depend on ['stem.conv.weight']"),
        *weekly(
            ({BUILD: "    return nn.Sequential(blocks).requires_grad_(False)\n"}, "requires a gradient"),
            ({BUILT: BUILT[1].removesuffix(', Digits("test")')}, "return three"),
            ({COLLATED: f"collate_fn = {DICT}"}, "a batch is a pair (inputs, targets), not a dict"),
        ),
    ],
)
def test_what_cannot_be_trained_or_evaluated_is_one_line(bake: Bake, changes: Changes, named: str) -> None:
    project = bake()
    edit(project, changes)
    assert named in refuse(project)


@pytest.mark.parametrize("parallelism", ["pipeline", *weekly("mesh")])
def test_a_model_that_is_all_frozen_is_refused(bake: Bake, parallelism: str) -> None:
    project = bake(parallelism=parallelism)
    edit(project, {BUILD: "    return nn.Sequential(blocks).requires_grad_(False)\n"})
    assert "all parameters are frozen" in refuse(project)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (add(ACCURACY, ' "thing": object(),'), "Task.aggregate returns what JSON cannot hold: 'object' object"),
        ({ACCURACY: ""}, "'accuracy'"),
        ({METRICS: 'return {"top": outputs.max(), "loss": losses,'}, "top"),
        *weekly(
            (
                add(ACCURACY, ' "thing": {np.int64(3): 1},'),
                "Task.aggregate returns what JSON cannot hold: keys must be",
            ),
            (add(ACCURACY, ' "step": 3,'), "two of these have one name: ['event', 'step',"),
            ({ACCURACY: ' "accuracy": correct[:1],'}, "'accuracy'"),
            ({METRICS: 'return {"top": outputs.flatten(), "loss": losses,'}, "top"),
        ),
    ],
)
def test_a_metric_that_cannot_be_recorded_is_named_at_the_first_evaluation(
    bake: Bake, changes: Changes, named: str
) -> None:
    project = bake()
    edit(project, changes)
    assert named in refuse(project, "--train.eval_every", "1")
    assert len(read_records(project / "run", "train")) == 1


def test_names_may_have_an_umlaut_in_an_ascii_locale(bake: Bake) -> None:
    project, ascii_locale = bake(), {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0"}
    edit(project, {ACCURACY: ACCURACY[1] + ' "größe": 1.0,'})
    for steps in ("2", "4"):
        launch(project, *SMALL, "--run.dir", "läufe", "--train.max_steps", steps, nproc=1, **ascii_locale)
    assert len(read_losses(project / "läufe")) == 4 and not list(project.rglob("*.damaged"))
    assert read_records(project / "läufe", "eval")[-1]["größe"] == 1


def test_metrics_become_plain_numbers_and_the_checkpoint_can_be_read(bake: Bake) -> None:
    project = bake()
    edit(project, {METRICS: 'return {"top": outputs.amax(1).bfloat16(), "loss": losses,'})
    edit(project, add(ACCURACY, ' "top": metrics["top"].max(), "nan": np.float32("nan"),'))
    edit(project, add(ACCURACY, ' "list": torch.arange(2), "each": {"a": np.int64(4), 3: correct[:2]},'))
    run_alone(project, *SMALL, "--run.dir", "run", "--train.eval_every", "2")
    (first, last), saved = read_records(project / "run", "eval"), load(project / "run")
    assert isinstance(last["top"], float) and last["nan"] is None and last["list"] == [0, 1]
    assert last["each"] == {"a": 4, "3": last["each"]["3"]} and len(first["each"]["3"]) == 2
    assert saved["progress"] == {"step": 4, "epoch": 0, "samples": 128}


@pytest.mark.weekly
def test_what_evaluates_is_what_trained(bake: Bake) -> None:
    project = bake(task="language")
    (project / "mine.txt").write_text("a text of one's own, " * 4000)  # So both sets hold the same.
    words = ["--dataset.path", "mine.txt", "--dataset.test_bytes", "21000", "--run.seed", "5"]
    run_alone(project, *SMALL, *words, "--train.precision", "bf16", "--run.dir", "run")
    recorded = read_records(project / "run", "eval")[-1]
    evaluate = ["evaluate", "--distributed.device", "cpu", "--checkpoint", "run/checkpoints/step-00000004.pt"]
    assert json.loads(run_alone(project, *evaluate).stdout) == recorded | {"split": "test"}
    for given in (["--dataset.test_bytes", "10000"], ["--dataset", '{"test_bytes": 10000, "path": "mine.txt"}']):
        result = run_alone(project, *evaluate, *given)
        assert json.loads(result.stdout)["num_samples"] < recorded["num_samples"]
    # At temperature 0, nothing is drawn, but between equals, which bf16 has.
    words = ["generate", *evaluate[1:], "--train.precision=fp32", "--temperature=0", "--length=20", "--run.seed"]
    assert len({run_alone(project, *words, seed).stdout for seed in "12"}) == 1


DRAWN = """torch.utils.data.random_split(Digits("train"), [1000, 437])
    order = [np.random.permutation(1000).tolist(), list(range(1000))]
    random.shuffle(order[1])
    train_set = torch.utils.data.Subset(torch.utils.data.Subset(train_set, order[0]), order[1])
    return train_set, test_set, test_set"""


@pytest.mark.weekly
def test_datasets_are_drawn_from_the_seed_in_every_command(bake: Bake) -> None:
    project = bake()
    edit(project, {BUILT: "train_set, test_set = " + DRAWN})
    for nproc in (1, 2):
        launch(project, *SMALL, "--run.dir", f"run{nproc}", "--run.seed", "5", nproc=nproc)
    assert read_losses(project / "run1") == pytest.approx(read_losses(project / "run2"), rel=1e-5)
    evaluate = ["evaluate", "--distributed.device", "cpu", "--checkpoint", "run1/checkpoints/step-00000004.pt"]
    evaluate += ["--run.dir", "run"]  # A value is no name of a setting.
    evaluated = json.loads(launch(project, *evaluate, nproc=1).stdout)
    assert evaluated == read_records(project / "run1", "eval")[-1] | {"split": "test"}


@pytest.mark.parametrize("parallelism", ["fsdp", *weekly("ddp", "tensor", "pipeline")])
def test_a_model_is_drawn_from_the_seed_on_every_rank(bake: Bake, parallelism: str) -> None:
    project = bake(parallelism=parallelism)
    edit(project, {("model.py", "from torch import"): "import random\n\nimport numpy as np\nfrom torch import"})
    edit(project, add(STEM, "        self.conv.weight.data *= float(np.random.rand()) + random.random()\n"))
    for nproc in (1, 2):
        launch(project, *SMALL, "--data.micro_batch_size", "4", "--run.dir", f"run{nproc}", nproc=nproc)
    assert read_losses(project / "run1") == pytest.approx(read_losses(project / "run2"), rel=1e-5)


def test_sets_have_the_same_order_on_every_rank_and_start(bake: Bake) -> None:
    project = bake()
    order = "self.labels = torch.tensor([[*{str(i) for i in range(10)}].index(str(int(i))) for i in self.labels])"
    edit(project, add(LOADED, f"        {order}\n"))
    for nproc in (1, 2):
        launch(project, *SMALL, "--run.dir", f"run{nproc}", nproc=nproc)
    assert read_losses(project / "run1") == pytest.approx(read_losses(project / "run2"), rel=1e-5)


# A file is opened in the process that reads it; text and negative strides mean something to collate_fn alone.
LAZY = {SAMPLE: '        self.file = getattr(self, "file", None) or open(__file__)\n' + SAMPLE[1]}
RAW = {
    PAIR: "image = self.images[index, None, row : row + 8, column : column + 8].numpy()\n"
    '        return image[..., ::-1], np.array(["x" * int(self.labels[index])], dtype=object)',
    COLLATED: "def collate_fn(samples):\n"
    "    return default_collate([(torch.tensor(image.copy()), torch.tensor(len(x[0]))) for image, x in samples])\n",
}


@pytest.mark.parametrize("parallelism", ["ddp", *weekly("pipeline")])
def test_nothing_but_the_loader_and_collate_fn_touches_a_sample(bake: Bake, parallelism: str) -> None:
    project = bake(parallelism=parallelism)
    edit(project, LAZY)
    edit(project, RAW)
    run_alone(project, *SMALL, *WORKERS, "--run.dir", "run")


@pytest.mark.weekly
def test_an_evaluation_of_many_batches_opens_few_files(bake: Bake) -> None:
    project = bake()
    command = ["bash", "-c", 'ulimit -n 120; exec scripts/launch.sh "$@"', "_", *SMALL, *WORKERS, "--run.dir", "run"]
    run(*command, "--data.eval_batch_size", "1", cwd=project)


def test_weights_of_other_programs_load_or_are_named(bake: Bake, tmp_path: Path) -> None:
    project = bake()
    run_alone(project, *SMALL, "--run.dir", "first")
    model = load(project / "first")["model"]
    contents = {
        "own": {"model": model},
        "wrapped": {"state_dict": model, "epoch": 3},
        "compiled": {f"_orig_mod.{name}": value for name, value in model.items()},
        "parallel": {f"module.{name}": value for name, value in model.items()},
        "other": {f"net.{name}": value for name, value in model.items()},
        "code": {"model": model, "path": PurePosixPath("x")},
        "old": {"model": model},  # As PyTorch before 1.6 wrote it.
    }
    losses = {}
    for name, content in contents.items():
        torch.save(content, tmp_path / f"{name}.pt", _use_new_zipfile_serialization=name != "old")
        words = ["--model.weights", str(tmp_path / f"{name}.pt")]
        if name == "other":
            assert "net.stem.conv.weight" in refuse(project, *words)
        elif name == "code":
            assert "PurePosixPath" in refuse(project, *words)
        elif name == "old":
            assert "load and save it again" in refuse(project, *words)
        else:
            run_alone(project, *SMALL, *words, "--train.max_steps", "1", "--run.dir", name)
            (losses[name],) = read_losses(project / name)
    assert len(set(losses.values())) == 1 and losses["own"] != read_losses(project / "first")[0]
    assert "model.weights" in refuse(project, "--checkpoint.resume", str(tmp_path / "own.pt"))


def test_a_link_to_a_folder_that_is_not_mounted_is_no_fresh_start(bake: Bake) -> None:
    project = bake()
    (project / "run").mkdir()
    (project / "run" / "checkpoints").symlink_to("/nowhere/checkpoints")
    assert "File exists: 'run/checkpoints'" in refuse(project)
    assert not (project / "run" / "metrics.jsonl").exists()


def test_a_folder_with_a_colon_is_refused(bake: Bake, tmp_path: Path) -> None:
    assert "colon" in refuse(Path(copytree(bake(), tmp_path / "a:b")), nproc=2)


def test_state_of_ones_own_is_saved_and_restored_on_every_rank(bake: Bake) -> None:
    project = bake()
    counter = "        self.calls += 1\n        print(f'call {self.calls}\\n', end='')\n"
    state = "    def get_extra_state(self):\n        return self.calls\n\n    def set_extra_state(self, state):\n"
    edit(project, add(STEM, "        self.calls = 0\n"))
    edit(project, {FORWARD: state + "        self.calls = state\n\n" + FORWARD[1] + counter})
    launch(project, *SMALL, "--run.dir", "run")  # Four steps; the evaluation comes after the checkpoint.
    output = launch(project, *SMALL, "--run.dir", "run", "--train.max_steps", "5").stdout
    assert output.count("call 5") == 2 and "call 4" not in output


@pytest.mark.parametrize("launcher", ["torchrun", "spawn"])
def test_no_rank_outlives_a_launcher_that_is_killed_while_they_start(bake: Bake, launcher: str) -> None:
    project = bake(launcher=launcher)
    command = [project / "scripts" / "launch.sh", *SMALL, "--train.max_steps", "40", "--run.dir", "run"]
    with started(*command, cwd=project, NPROC="2", MARK=str(project)) as process:
        wait_until(lambda: len(ranks_of(process.pid)) == 2, "two ranks")
        os.kill(process.pid, SIGKILL)
        process.wait()
        wait_until(lambda: not find_processes(f"MARK={project}"), "no process is left", seconds=60)


def ranks_of(launcher: int) -> list[str]:
    """Return the child processes of a launcher that are ranks."""
    command = ["pgrep", "-P", str(launcher), "-f", "--", "-m my_experiment|spawn_main"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()


CONNECTION = "RuntimeError: the connection to the database: timeout of gloo"


@pytest.mark.parametrize(
    ("parallelism", "line", "words"),
    [("ddp", SAMPLE, WORKERS), *weekly(("pipeline", FORWARD, []), ("fsdp", LOSSES, []))],
)
def test_what_an_error_says_does_not_hide_it(
    bake: Bake, parallelism: str, line: tuple[str, str], words: list[str]
) -> None:
    project, rank = bake(parallelism=parallelism), int(line != FORWARD)  # An error of the first stage is wrapped.
    name, text = CONNECTION.split(": ", 1)
    fault = f'        if __import__("os").environ["RANK"] == "{rank}":\n            raise {name}("{text}")\n'
    edit(project, {line: line[1] + fault if line == FORWARD else fault + line[1]})
    err = launch(project, *SMALL, *words, "--run.dir", "run", code=1).stderr
    assert f"\n{CONNECTION}\n" in err, err
    assert rank == 0 or err.endswith(f"\nerror: rank 0 waited in vain: rank 1 failed with {CONNECTION}\n"), err


@pytest.mark.parametrize("parallelism", ["fsdp", *weekly("tensor")])
def test_a_rank_that_waits_for_a_killed_one_prints_one_line(bake: Bake, parallelism: str) -> None:
    project = bake(parallelism=parallelism)
    fault = '        import os\n        if os.environ["RANK"] == "1":\n            os.kill(os.getpid(), 9)\n'
    edit(project, {LOSSES: fault + LOSSES[1]})
    waited, killed = launch(project, *SMALL, "--run.dir", "run", code=1).stderr.splitlines()
    assert waited.startswith("error: rank 0 waited in vain: a rank died or left (RuntimeError: "), waited
    assert "gloo" not in waited and killed == "error: rank 1 was ended by SIGKILL"


@pytest.mark.parametrize(
    ("rank", "workers", "killed"), [(1, "1", 1), pytest.param(0, "3", 6, marks=pytest.mark.weekly)]
)
def test_a_loader_process_that_dies_is_named(bake: Bake, rank: int, workers: str, killed: int) -> None:
    project = bake()
    words = [*SMALL, "--train.epochs", "1000", "--train.max_steps", "20000", "--train.eval_every", "4"]
    words += ["--data.num_workers", workers, "--distributed.timeout_seconds", "60", "--run.dir", "run"]
    with started(project / "scripts" / "launch.sh", *words, cwd=project, NPROC="2") as launcher:
        wait_until(lambda: len(read_losses(project / "run")) > 8, "both loaders have processes")
        (parent,) = {*map(int, ranks_of(launcher.pid))} & {*find_processes(f"LOCAL_RANK={rank}")}
        command = ["pgrep", "-P", str(parent), "-f", "--", "spawn_main"]
        loaders = [*map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())]
        assert len(loaders) == 2 * int(workers)
        for loader in loaders[:killed]:
            os.kill(loader, SIGKILL)
        assert launcher.wait(timeout=40) == 1  # Long before ranks would have waited in vain.
        err = launcher.communicate(timeout=60)[1]
    assert any(f"(pid {loader}) is killed by signal" in err for loader in loaders[:killed]), err
    assert rank == 0 or "rank 0 waited in vain: rank 1 failed with RuntimeError: DataLoader worker" in err, err


def test_an_unexpected_error_of_rank_0_while_all_wait_ends_them_at_once(bake: Bake) -> None:
    project = bake()
    edit(project, {("config.py", "    weights: str | None"): "    others: str | None"})
    err = launch(project, *SMALL, "--run.dir", "run", code=2).stderr
    assert "no attribute 'weights'" in err.splitlines()[-1], err
    assert err.count("Traceback") == 1 and "\nerror: " in err, err


def test_a_run_that_fails_ends_although_nobody_reads_why(bake: Bake) -> None:
    project, words = bake(), ["--optim.lr", "1e30", "--optim.warmup_steps", "0"]
    script = 'exec timeout -s KILL 60 "$PYTHON" -m "$0" "$@" 2>&1 | true; exit "${PIPESTATUS[0]}"'
    (package,) = (project / "src").iterdir()
    run(
        "bash",
        "-c",
        script,
        package.name,
        *SMALL,
        *WORKERS,
        *words,
        "--run.dir",
        "run",
        cwd=project,
        code=2,
        PYTHONPATH="src",
    )


@pytest.mark.parametrize("redirection", ["2>&1 | true", *weekly("<&- >&- 2>&-")])
def test_a_run_whose_output_nobody_reads_ends_well(bake: Bake, redirection: str) -> None:
    project = bake()
    script = f'scripts/launch.sh "$@" {redirection}; exit "${{PIPESTATUS[0]}}"'
    (project / "run").mkdir()
    (project / "run/metrics.jsonl").write_text("damaged")
    run("bash", "-c", script, "_", *SMALL, *WORKERS, "--run.dir", "run", cwd=project, NPROC="2")
    assert len(read_losses(project / "run")) == 4 and (project / "run/checkpoints/step-00000004.pt").exists()


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"RANK": "0"}, "'WORLD_SIZE'"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "MASTER_ADDR expected"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT expected"),
        ({"RANK": "one", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}, "'one'"),
        ({"RANK": "0", "WORLD_SIZE": "two", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}, "'two'"),
    ],
)
def test_what_a_launcher_did_not_set_is_named(bake: Bake, variables: dict[str, str], named: str) -> None:
    project = bake()
    err = run_alone(project, *SMALL, "--run.dir", "run", code=2, **variables).stderr
    assert err.startswith("error: ") and err.count("\n") == 1 and named in err, err
    assert not (project / "run").exists()


@pytest.mark.weekly
def test_a_second_run_on_the_same_port_is_named_and_the_first_continues(bake: Bake) -> None:
    project = bake()
    words = [*SMALL, "--train.epochs", "100", "--distributed.init_method", f"tcp://127.0.0.1:{free_ports(1)[0]}"]
    words += ["--train.log_every", "100", "--train.max_steps"]
    first = (project / "scripts" / "launch.sh", *words, "1000", "--run.dir", "first")
    with started(*first, cwd=project, NPROC="2") as process:
        wait_until((project / "first" / "metrics.jsonl").exists, "the first run trains")
        err = launch(project, *words, "4", "--run.dir", "second", code=1).stderr
        assert "address already in use" in err and "Traceback" not in err, err
        assert process.wait(timeout=300) == 0


def test_ranks_meet_where_init_method_says(bake: Bake, tmp_path: Path) -> None:
    """Without the launcher's address."""
    words = ("--distributed.init_method", f"file://{tmp_path}/store", "--distributed.backend", "gloo")
    out = run_alone(bake(), *SMALL, "--run.dir", "run", *words, RANK="0", WORLD_SIZE="1").stdout
    assert "step 4/4" in out


def test_a_notebook_starts_ranks_and_keeps_its_signals(bake: Bake) -> None:
    words = [*SMALL, "--run.dir", "run"]
    script = "import signal\nfrom my_experiment.spawn import launch\nbefore = signal.getsignal(signal.SIGINT)\n"
    script += f"print(launch({words}, nproc=2))\nprint(signal.getsignal(signal.SIGINT) is before)"
    out = run_python(bake(launcher="spawn"), script)
    assert "on 2 rank(s)" in out and out.endswith("\n0\nTrue\n"), out


ALONE = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0", "HEAD": "127.0.0.1", "NPROC": "1"}


@pytest.mark.parametrize("script", ["launch.sh", "rank.sh"])
def test_a_script_is_called_through_a_link_from_anywhere(bake: Bake, tmp_path: Path, script: str) -> None:
    project = Path(copytree(bake(cluster="slurm"), tmp_path / "a project"))
    python = tmp_path / "a python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "train").symlink_to(project / "scripts" / script)
    (tmp_path / "link").symlink_to("train")
    run(tmp_path / "link", *SMALL, "--run.dir", "run", cwd=tmp_path, PYTHON=str(python), **ALONE)
    assert len(read_losses(tmp_path / "run")) == 4


@pytest.mark.parametrize("script", ["launch.sh", "rank.sh"])
@pytest.mark.parametrize("interpreter", ["absent", "no program", "of the environment", "of another project"])
def test_an_interpreter_that_cannot_run_is_named(bake: Bake, tmp_path: Path, script: str, interpreter: str) -> None:
    project, python, environment = bake(cluster="slurm"), tmp_path / "python", dict(ALONE)
    if interpreter == "of the environment":
        environment |= {"PYTHON": "", "PATH": "/usr/bin:/bin"}
        python = project / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
    environment |= {"PYTHON": "" if python.parent.name == "bin" else str(python)}
    if interpreter == "of another project":
        environment["PYTHON"] = "/usr/bin/python3"
    elif interpreter != "absent":
        python.write_text("import this\n")
    err = run(project / "scripts" / script, *SMALL, "--run.dir", "run", cwd=project, code=2, **environment).stderr
    assert err.count("\n") == 1 and "run 'make setup' first" in err, err


@pytest.mark.parametrize(
    ("visible", "ranks"), [("0,1,-1,2", 2), *weekly(("", 2), ("-1", 2), ("NoDevFiles", 2), ("0", 1))]
)
def test_ranks_are_as_many_as_visible_devices_or_two(bake: Bake, visible: str, ranks: int) -> None:
    project = bake()
    launcher = (project / "scripts" / "launch.sh", *SMALL, "--train.max_steps", "1", "--run.dir", "run")
    assert f" on {ranks} rank(s)" in run(*launcher, cwd=project, CUDA_VISIBLE_DEVICES=visible).stdout


def test_a_project_that_git_converts_for_windows_runs(bake: Bake, tmp_path: Path) -> None:
    project = bake(cluster="slurm")
    git = ("git", "-c", "core.autocrlf=true", "-c", "user.name=x", "-c", "user.email=x@example.com")
    for words in (("init", "--quiet"), ("add", "--all"), ("commit", "--quiet", "--message=x")):
        run(*git, *words, cwd=project)
    run(*git, "clone", "--quiet", project, tmp_path / "clone", cwd=tmp_path)
    files = [
        tmp_path / "clone" / name for name in ("README.md", "Makefile", "scripts/train.sbatch", "scripts/launch.sh")
    ]
    assert [b"\r\n" in file.read_bytes() for file in files] == [True, False, False, False]
    launch(tmp_path / "clone", *SMALL, "--run.dir", "run", nproc=1)


def test_the_template_is_the_same_where_git_converts_for_windows(tmp_path: Path) -> None:
    run("git", "-c", "core.autocrlf=true", "clone", "--quiet", TEMPLATE, tmp_path / "clone", cwd=tmp_path)
    for script in tmp_path.glob("clone/**/*.sh"):
        assert b"\r\n" not in script.read_bytes(), script
    run(BIN / "cookiecutter", tmp_path / "clone", "--no-input", "--output-dir", tmp_path, cwd=tmp_path)
    launch(tmp_path / "my-experiment", *SMALL, "--run.dir", "run", nproc=1)


# A parameter's state in fp64, in int8 and as a number, of which PyTorch's own loading changes the types.
TYPED = """

class Typed(torch.optim.Optimizer):
    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter, dtype=torch.float64)
                    state["sign"] = torch.zeros_like(parameter, dtype=torch.int8)
                    state["count"] = 0
                state["count"] += 1
                state["mean"].mul_(0.9).add_(parameter.grad / 3)
                step = (state["mean"] + state["sign"] / 3).to(parameter.dtype)
                parameter.sub_(step, alpha=group["lr"] / state["count"] ** 0.5)
                state["sign"].copy_(parameter.grad.sign())
"""


@pytest.mark.weekly
@pytest.mark.parametrize("parallelism", CHOICES["parallelism"])
def test_the_optimizers_state_comes_back_in_its_types(bake: Bake, parallelism: str) -> None:
    project, nproc = bake(parallelism=parallelism), 1 if parallelism == "data_parallel" else 2
    edit(project, {("optim.py", f"torch.optim.{OPTIMIZER[1]}"): "Typed(groups, lr=config.lr)"})
    file = next((project / "src").iterdir()) / "optim.py"
    file.write_text(file.read_text() + TYPED)
    launch(project, *SMALL, "--run.dir", "straight", nproc=nproc)
    for steps in ("2", "4"):
        launch(project, *SMALL, "--run.dir", "run", "--train.max_steps", steps, nproc=nproc)
    assert read_losses(project / "run") == read_losses(project / "straight")
    states = load(project / "run")["optimizer"]["state"]
    assert {state["mean"].dtype for state in states.values()} == {torch.float64}
    assert {state["sign"].dtype for state in states.values()} == {torch.int8}
    assert {state["count"] for state in states.values()} == {4}


def test_a_part_in_eval_mode_stays_so_after_an_evaluation(bake: Bake) -> None:
    project = bake()
    edit(project, BATCH_NORM | {BUILD: f"    blocks['stem'].eval()\n{BUILD[1]}"})
    run_alone(project, *SMALL, "--run.dir", "run", "--train.eval_every", "1")
    assert not load(project / "run")["model"]["stem.norm.running_mean"].any()


def test_records_are_as_exact_as_their_numbers(bake: Bake) -> None:
    project = bake()
    edit(project, add(TASK, "        torch.set_default_dtype(torch.bfloat16)\n"))
    edit(project, {FORWARD: f"{FORWARD[1]}        images = images.bfloat16()\n"})
    run_alone(project, *SMALL, "--run.dir", "run")
    assert any(float(torch.tensor(loss).bfloat16()) != loss for loss in read_losses(project / "run"))


def test_a_record_has_the_mean_of_its_interval(bake: Bake) -> None:
    project = bake()
    run_alone(project, *SMALL, "--run.dir", "each")
    run_alone(project, *SMALL, "--run.dir", "all", "--train.log_every", "4")
    (record,) = read_records(project / "all", "train")
    assert record["loss"] == pytest.approx(sum(read_losses(project / "each")) / 4)


def test_training_batches_alone_are_augmented(bake: Bake) -> None:
    project = bake()
    run_alone(project, *SMALL, "--run.dir", "run", "--train.max_steps", "2")
    edit(project, {AUGMENTED: AUGMENTED[1].replace("return", "raise RuntimeError('augmented') #")})
    run_alone(project, "evaluate", "--checkpoint", "run", "--distributed.device", "cpu")
    assert "augmented" in run_alone(project, *SMALL, "--run.dir", "run", code=1).stderr


NAN = add(STEM, "        self.register_buffer('scale', self.norm.weight.detach() * float('nan'))\n")
INDEX = {METRICS: METRICS[1].replace('"loss"', '"index"')}


@pytest.mark.parametrize(("changes", "named"), [(NAN, "scale has NaN"), (INDEX, "a metric named index")])
def test_what_would_be_wrong_without_a_word_is_named(bake: Bake, changes: Changes, named: str) -> None:
    project = bake()
    edit(project, changes)
    assert named in refuse(project)


def test_changed_code_is_named_on_a_resume(bake: Bake) -> None:
    project = bake()
    words = ("--run.dir", "run", "--train.max_steps")
    run_alone(project, *SMALL, *words, "2")
    edit(project, {LOSSES: LOSSES[1].replace('"sum")', '"sum") * 0.5')})
    assert re.findall("^changed: [a-z_]+.py", run_alone(project, *SMALL, *words, "3").stdout, re.M) == [
        "changed: task.py"
    ]
    assert "task.py" not in run_alone(project, *SMALL, *words, "4").stdout


def test_sets_have_one_order_without_a_launcher(bake: Bake) -> None:
    project = bake()
    names = "{f'name{number}' for number in range(100)}"
    edit(project, {LOADED: f"{LOADED[1]}        print(*{names})\n"})
    orders = set()
    for number in range(2):
        out = run_alone(project, *SMALL, "--run.dir", f"run{number}", PYTHONHASHSEED="random").stdout
        orders.add(out.splitlines()[0])
    assert len(orders) == 1


def test_bounds_stand_beside_their_setting(bake: Bake) -> None:
    project = bake()
    eps = ("config.py", "    eps: float = 1e-8\n")
    edit(project, add(eps, "    ema_decay: float = 0.9\n    share: Annotated[float, 0, 1] = 0.5\n"))
    words = (*SMALL, "--preflight")
    run_alone(project, *words, "--optim.ema_decay", "0", "--optim.share", "1")
    for word, named in (
        ("--optim.share=1.5", "from 0 to 1"),
        ("--optim.lr=0", "optim.lr is 0"),
        ("--run.dir=~/x", "HOME"),
    ):
        assert named in run_alone(project, *words, word, code=2).stderr


def test_ctrl_c_without_a_launcher_exits_with_its_own_code(bake: Bake) -> None:
    project = bake()
    (package,) = (project / "src").iterdir()
    command = [BIN / "python", "-m", package.name, *SMALL, "--train.max_steps", "400", "--run.dir", "run"]
    with started(*command, cwd=project, PYTHONPATH="src") as process:
        wait_until(lambda: read_records(project / "run"), "the first step")
        process.send_signal(SIGINT)
        assert process.wait(60) == 130
    assert list(project.glob("run/checkpoints/*.pt"))


PLANTED = """
import os, pickle
import torch.distributed as dist
from my_experiment.distributed import Process

class Planted:
    def __reduce__(self):
        return os.mkdir, ("planted",)

store = dist.HashStore()
store.set("main1/0", pickle.dumps(Planted()))
try:
    Process(store, rank=1, world_size=2).on_main(None)
except ValueError:
    print("refused", os.path.exists("planted"))
"""


def test_a_value_that_others_put_into_the_store_runs_no_code(bake: Bake) -> None:
    assert run_python(bake(), PLANTED) == "refused False\n"


def test_a_record_whose_metric_is_a_text_does_not_end_a_run(bake: Bake) -> None:
    project = bake()
    words = ("--run.dir", "run", "--train.max_steps")
    run_alone(project, *SMALL, *words, "2")
    records = project / "run" / "metrics.jsonl"
    records.write_text(re.sub('"accuracy": [0-9.]+', '"accuracy": "high"', records.read_text()))
    run_alone(project, *SMALL, *words, "4")


def test_more_stop_signals_do_not_end_ranks_before_they_have_saved(bake: Bake) -> None:
    project, run_dir = bake(), "run"
    write = ("checkpoint.py", "        files.write_atomically(path, lambda")
    edit(project, {write: f"        __import__('time').sleep(2)\n{write[1]}"})
    words = [*SMALL, "--train.max_steps", "400", "--run.dir", run_dir]
    with started(project / "scripts" / "launch.sh", *words, cwd=project, NPROC="2") as launcher:
        wait_until(lambda: read_records(project / run_dir), "the first step")
        for _ in range(4):
            launcher.send_signal(SIGTERM)
            time.sleep(0.1)
        out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 143 and "stopped after step" in out, (out, err)
    assert list(project.glob("run/checkpoints/*.pt"))


def test_a_run_needs_no_proc(bake: Bake) -> None:
    script = 'mount -t tmpfs none /proc && exec "$@"'
    words = ["unshare", "--mount", "sh", "-c", script, "sh", "scripts/launch.sh", *SMALL, "--run.dir", "run"]
    project = bake()
    assert "step 4/4" in run(*words, cwd=project, NPROC="2").stdout


def test_evaluate_takes_the_split_that_it_is_told(bake: Bake) -> None:
    project = bake()
    run_alone(project, *SMALL, "--run.dir", "run")
    words = ("evaluate", "--checkpoint", "run", "--distributed.device", "cpu", "--split")
    *_, recorded = read_records(project / "run", "eval")
    assert json.loads(run_alone(project, *words, "validation").stdout) == recorded
    assert json.loads(run_alone(project, *words, "test").stdout)["num_samples"] == 360
    assert "train" in run_alone(project, *words, "train", code=2).stderr


PLANT = """
import os, pickle, sys

class Planted:
    def __reduce__(self):
        return os.mkdir, ("planted",)

with open(sys.argv[1], "wb") as index:
    pickle.dump(Planted(), index)
"""


def test_a_planted_index_of_a_sharded_checkpoint_runs_no_code(bake: Bake, tmp_path: Path) -> None:
    project, other = bake("sharding", parallelism="fsdp"), bake("ddp")
    words = [*SMALL, *SHARDED, "--run.dir", "run", "--train.max_steps"]
    launch(project, *words, "4")
    checkpoint = project / "run" / "checkpoints" / "step-00000004.dcp"
    copytree(checkpoint, tmp_path / "good.dcp")
    run_python(project, PLANT, str(checkpoint / ".metadata"))
    named = "posix.mkdir in a checkpoint's index might run code"
    resume = [*SMALL, "--run.dir", "new", "--checkpoint.resume", checkpoint]
    assert named in run_alone(project, *resume, code=2).stderr
    evaluate = ("evaluate", "--checkpoint", checkpoint, "--distributed.device", "cpu")
    assert named in run_alone(project, *evaluate, code=2).stderr
    # What does not read shards does not read the index.
    weights = [*SMALL, "--run.dir", "new", "--model.weights", checkpoint]
    export = ["export", "--checkpoint", checkpoint, "--output", "w.safetensors"]
    for reader, words_of_reader in ((project, weights), (project, export), (other, weights), (other, resume)):
        assert f"{checkpoint} is sharded" in run_alone(reader, *words_of_reader, code=2).stderr
    assert named in run_alone(project, *words, "5", code=2).stderr and checkpoint.exists()  # It is not set aside.
    # PyTorch would take another file for the index if this one is none.
    checkpoint.joinpath("__0.metadata").write_bytes(checkpoint.joinpath(".metadata").read_bytes())
    for content in (pickle.dumps(None), (tmp_path / "good.dcp" / ".metadata").read_bytes()):
        checkpoint.joinpath(".metadata").write_bytes(content)
        run_alone(project, *resume, code=2)
    assert not list(project.rglob("planted")) and not list(other.rglob("planted"))


@pytest.mark.weekly
def test_a_sharded_checkpoint_becomes_a_file_by_the_command_that_is_printed(bake: Bake) -> None:
    project, other = bake("sharding", parallelism="fsdp"), bake("ddp")
    launch(project, *SMALL, *SHARDED, "--run.dir", "run")
    checkpoint = project / "run" / "checkpoints" / "step-00000004.dcp"
    words = [*SMALL, "--run.dir", "new", "--train.max_steps", "1", "--model.weights"]
    command = run_alone(other, *words, checkpoint, code=2).stderr.partition("file of weights: python ")[2]
    run(BIN / "python", *command.split()[:-1], "weights.pt", cwd=other)
    run_alone(other, *words, "weights.pt")
    run_alone(project, *words, other / "weights.pt")
    first, sharded = (load(folder / "new") for folder in (other, project))
    assert first["config"]["model"]["weights"] == "weights.pt"
    assert all(torch.equal(first["model"][name], sharded["model"][name]) for name in first["model"])


# An optimizer that keeps numbers in its groups, as Prodigy, D-Adaptation and schedule-free ones do.
COUNTING = """

class Counting(torch.optim.Optimizer):
    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr, "d": 1.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["d"] *= FACTOR
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] * group["d"])
"""


@pytest.mark.parametrize(
    ("parallelism", "factor", "named"),
    [
        *weekly(("ddp", "1.5", ""), ("fsdp", "1.5", "")),
        ("fsdp", "1.5 + float(self.param_groups[-1]['params'][0].to_local().sum())", "numbers differ between ranks"),
    ],
)
def test_numbers_that_an_optimizer_keeps_resume_or_are_refused(
    bake: Bake, parallelism: str, factor: str, named: str
) -> None:
    project = bake(parallelism=parallelism)
    edit(project, {("optim.py", f"torch.optim.{OPTIMIZER[1]}"): "Counting(groups, lr=config.lr)"})
    file = next((project / "src").iterdir()) / "optim.py"
    file.write_text(file.read_text() + COUNTING.replace("FACTOR", factor))
    if named:
        assert named in refuse(project, nproc=2) and not list(project.glob("run/checkpoints/*.pt"))
        return
    train = run_alone if parallelism == "ddp" else launch
    train(project, *SMALL, "--run.dir", "straight")
    for steps in ("2", "4"):
        train(project, *SMALL, "--run.dir", "run", "--train.max_steps", steps, "--optim.weight_decay", "0")
    assert read_losses(project / "run") == read_losses(project / "straight")
    assert load(project / "run")["numbers"] == {"d": 1.5**4}


@pytest.mark.parametrize("parallelism", ["fsdp", *weekly("pipeline", "tensor", "mesh")])
def test_weights_that_are_drawn_after_wrap_are_those_of_one_rank(bake: Bake, parallelism: str) -> None:
    drawn = "    model = nn.Sequential(blocks)\n    for parameter in model.parameters():\n"
    drawn += "        nn.init.normal_(parameter, std=0.1)\n    return model\n"
    projects = bake("one"), bake("shards", parallelism=parallelism)
    for project, ranks in zip(projects, (1, 2), strict=True):
        edit(project, {BUILD: drawn})
        launch(project, *SMALL, "--run.dir", "run", nproc=ranks)
    expected, losses = (read_losses(project / "run") for project in projects)
    assert losses == pytest.approx(expected, rel=1e-5)


HOOKED = "    model = nn.Sequential(blocks)\n    model.{}\n    return model\n"
FORWARD_HOOK = "register_forward_hook(lambda model, inputs, outputs: outputs * 2)"
BUFFER = "register_buffer('scale', Tensor([2.0]))"


@pytest.mark.parametrize("parallelism", ["pipeline", *weekly("mesh")])
@pytest.mark.parametrize("hung", [FORWARD_HOOK, BUFFER])
def test_what_hangs_on_a_whole_model_that_has_stages_is_refused(bake: Bake, parallelism: str, hung: str) -> None:
    project = bake(parallelism=parallelism)
    edit(project, {BUILD: HOOKED.format(hung)})
    assert "of what build_model wraps" in refuse(project)


# A layer that one of two micro-batches lacks, the second one or, on rank 1, the first.
SOMETIMES = """        features = features.mean(dim=(2, 3))
        self.calls = getattr(self, "calls", 0) + 1
        uses = not self.training or bool((self.calls + {} * self.rank) % 2)
        {}
        return self.linear(features)
"""
LACKS = "features = features + self.extra(features) if uses else features"
OTHER = "features = features + (self.extra if uses else self.other)(features)"
ZERO = "features = features + self.extra(features) * uses"  # Its gradient is zero, and not missing.


@pytest.mark.parametrize(
    ("parallelism", "nproc", "words", "other", "named"),
    [
        ("ddp", 2, [], 1, "unused in the last micro-batch"),
        ("fsdp", 2, ["--train.allow_unused", "true"], 1, "only some ranks use head."),
        *weekly(
            ("ddp", 2, ["--train.allow_unused", "true"], 1, ""),
            ("fsdp", 2, ["--train.allow_unused", "true"], 0, ""),
            ("ddp", 1, ["--train.max_steps", "1"], 0, "unused in the last micro-batch"),
            ("ddp", 2, ["--train.allow_unused", "true"], 0, ""),
            ("fsdp", 2, [], 1, "the loss does not depend on ['head."),
            ("tensor", 4, [], 1, "'] in each micro-batch"),
        ),
    ],
)
def test_a_layer_that_some_micro_batches_lack_is_right_or_refused(
    bake: Bake, parallelism: str, nproc: int, words: list[str], other: int, named: str
) -> None:
    layer = '        self.rank = int(__import__("os").environ.get("RANK", 0))\n'
    layer += "        self.extra = nn.Linear(width, width)\n"
    if parallelism != "ddp" and other:
        # FSDP would add up the gradients of two layers. If their sizes differed, gloo would end the ranks.
        layer += "        self.other = nn.Linear(width, width)\n"
    sizes = ["--parallel.replicas", "2"] if parallelism == "tensor" else []
    words = [*SMALL, "--train.max_steps", "2", *words, *sizes, "--data.micro_batch_size", "8", "--run.dir", "run"]
    project = bake(parallelism=parallelism)
    edit(project, {HEAD: HEAD[1] + layer, POOLED: SOMETIMES.format(other, OTHER if "other" in layer else LACKS)})
    if named:
        error = launch(project, *words, nproc=nproc, code=2).stderr
        assert named in error and not list(project.glob("run/checkpoints/*.pt")), error
        return
    launch(project, *words, nproc=nproc)
    reference = bake("reference", parallelism=parallelism)
    edit(reference, {HEAD: HEAD[1] + layer, POOLED: SOMETIMES.format(other, ZERO)})
    launch(reference, *words, nproc=nproc)
    found, expected = (
        [[record["loss"], record["grad_norm"]] for record in read_records(folder / "run", "train")]
        for folder in (project, reference)
    )
    assert found == [pytest.approx(numbers, rel=1e-6) for numbers in expected] and len(found) == 2


FROZEN = "        self.slow = nn.Linear(width, 1).requires_grad_(False)\n"
CODEBOOK = "        self.slow = nn.Module()\n"
CODEBOOK += "        self.slow.register_buffer('weight', torch.zeros(1), persistent=False)\n"


@pytest.mark.parametrize(
    ("parallelism", "nproc", "words", "layer"),
    [
        ("ddp", 1, [], FROZEN),
        ("ddp", 2, [], CODEBOOK),
        ("fsdp", 2, [], FROZEN),
        ("pipeline", 2, [], FROZEN),
        ("mesh", 2, ["--parallel.pipeline", "2"], FROZEN),
    ],
    ids=["a parameter", "a buffer", "what fsdp gathers", "what a pipeline gathers", "what a mesh gathers"],
)
def test_what_micro_batches_change_is_named_at_the_first_record(
    bake: Bake, parallelism: str, nproc: int, words: list[str], layer: str
) -> None:
    project = bake(parallelism=parallelism)
    changed = "        with torch.no_grad():\n            self.slow.weight.add_(features.mean())\n"
    edit(project, IMPORTED | {HEAD: HEAD[1] + layer, POOLED: changed + POOLED[1]})
    assert re.search(r"micro-batches change (model\.)?head\.slow\.weight", refuse(project, *words, nproc=nproc))
    assert not list(project.glob("run/checkpoints/*.pt"))


def test_a_table_that_forward_makes_longer_is_accepted(bake: Bake) -> None:
    project = bake()
    longer = "        self.slow.weight = torch.arange(float(len(features)))\n"
    edit(project, IMPORTED | {HEAD: HEAD[1] + CODEBOOK, POOLED: longer + POOLED[1]})
    run_alone(project, *SMALL, "--run.dir", "run")


def add_parameter(made: str, used: str) -> Changes:
    """Return an edit that gives the head one more parameter, and uses it for the logits."""
    line = {HEAD: f"{HEAD[1]}        self.more = {made}\n", POOLED: f"{POOLED[1].rstrip()} {used}\n"}
    return IMPORTED | line


COMPLEX = add_parameter("nn.Parameter(torch.ones(3, dtype=torch.complex64))", "* self.more.abs().mean()")
SPARSE = add_parameter("nn.Parameter(torch.eye(CLASSES).to_sparse())", "@ self.more")
ROWS = add_parameter("nn.Embedding(5, CLASSES, sparse=True)", "+ self.more(torch.zeros(1, dtype=torch.long))")
EMPTY = add_parameter("nn.Parameter(torch.zeros(0))", "+ self.more.sum()")
NORMED = {HEAD: "        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(width, CLASSES))\n"}
LOADS = {
    BUILD: "    model = nn.Sequential(blocks)\n"
    "    zeros = {name: torch.zeros(value.shape) for name, value in model.state_dict().items()}\n"
    "    model.load_state_dict(zeros)\n    return model\n"
}


@pytest.mark.parametrize(
    ("parallelism", "changes", "named"),
    [
        ("ddp", SPARSE, "No support for sparse tensors"),
        ("fsdp", {OPTIMIZER: "Rprop(groups, lr=config.lr)"}, "require placement changes"),
        *weekly(
            ("ddp", {OPTIMIZER: "LBFGS([p for group in groups for p in group['params']])"}, "'closure'"),
            ("fsdp", IMPORTED | LOADS, "state_dict for Sequential"),
            ("tensor", NORMED, "distribute leaf tensors"),
            ("ddp", ROWS, "from the 'SparseCPU' backend"),
            ("fsdp", {OPTIMIZER: "Adafactor(groups, lr=config.lr)"}, "require placement changes"),
            ("fsdp", EMPTY, "expects non-empty tensor"),
            ("tensor", EMPTY, "expects non-empty tensor"),
            *((strategy, IMPORTED | LOADS, "state_dict for Sequential") for strategy in ("tensor", "mesh")),
        ),
    ],
)
def test_what_pytorch_cannot_do_is_one_line(bake: Bake, parallelism: str, changes: Changes, named: str) -> None:
    project = bake(parallelism=parallelism)
    edit(project, changes)
    words = ["--parallel.tensor", "2"] if changes is NORMED else []
    assert named in refuse(project, *words, nproc=2)
    assert not read_records(project / "run", "train")


@pytest.mark.weekly
@pytest.mark.parametrize(
    "changes",
    [
        COMPLEX,
        {OPTIMIZER: "Adafactor(groups, lr=config.lr)"},
        *weekly(EMPTY, {OPTIMIZER: "AdamW(groups, lr=torch.tensor(config.lr), betas=config.betas, fused=True)"}),
    ],
)
def test_odd_weights_and_optimizers_are_as_on_one_rank(bake: Bake, changes: Changes) -> None:
    project = bake()
    edit(project, changes)
    for nproc in (1, 2):
        launch(project, *SMALL, "--optim.warmup_steps", "0", "--run.dir", f"run{nproc}", nproc=nproc)
    assert read_losses(project / "run2") == pytest.approx(read_losses(project / "run1"), rel=1e-5)


def test_weights_beside_which_a_module_keeps_anything_are_exported(bake: Bake) -> None:
    project = bake()
    state = (
        "    def get_extra_state(self):\n        return 3\n\n    def set_extra_state(self, state):\n        pass\n\n"
    )
    edit(project, {FORWARD: state + FORWARD[1]})
    run_alone(project, *SMALL, "--run.dir", "run")
    run_alone(project, "export", "--checkpoint", "run", "--output", "weights.safetensors")
    assert load_file(project / "weights.safetensors").keys() == load(project / "run")["model"].keys() - {
        "stem._extra_state"
    }


COUNTER = {("task.py", '        return {"loss": F'): '        self.calls += 1\n        return {"loss": F'}
TEACHER_CENTER = {
    ("task.py", '        return {"loss": F'): '        self.teacher.calls.add_(1)\n        return {"loss": F'
}
CENTER = {("task.py", '        return {"loss": F'): '        self.calls.add_(1)\n        return {"loss": F'}


@pytest.mark.parametrize(
    "changes",
    [
        COUNTER | add(TASK, "        self.calls = 0\n"),
        CENTER | add(TASK, "        self.calls = torch.zeros(9)\n"),
        TEACHER_CENTER
        | add(
            TASK,
            "        self.teacher = torch.nn.Module()\n        self.teacher.register_buffer('calls', torch.zeros(9))\n",
        ),
    ],
)
def test_what_a_task_keeps_from_step_to_step_is_refused_at_the_first_record(bake: Bake, changes: Changes) -> None:
    project = bake()
    edit(project, changes)
    assert "micro-batches change Task" in refuse(project)
    assert not list(project.glob("run/checkpoints/*.pt"))


@pytest.mark.weekly
def test_what_an_evaluation_draws_depends_on_no_loader_process(bake: Bake) -> None:
    project = bake()
    noisy = "        outputs = outputs + torch.randn_like(outputs)\n"
    edit(project, {MEASURED: noisy + MEASURED[1]})
    for workers in "012":
        run_alone(project, *SMALL, "--data.num_workers", workers, "--run.dir", f"run{workers}")
    assert len({read_records(project / f"run{workers}", "eval")[-1]["loss"] for workers in "012"}) == 1


ON_A_PARAMETER = {
    "hook": "self.linear.weight.register_hook(lambda gradient: gradient * 2)",
    "later hook": "self.linear.weight.register_post_accumulate_grad_hook(lambda weight: weight.grad.zero_())",
    "attribute": "self.linear.weight.lr_scale = 2.0",
}


@pytest.mark.parametrize("parallelism", ["fsdp", *weekly("tensor", "pipeline", "mesh")])
@pytest.mark.parametrize("hung", ON_A_PARAMETER)
def test_what_hangs_on_a_parameter_is_refused_under_shards(bake: Bake, parallelism: str, hung: str) -> None:
    project = bake(parallelism=parallelism)
    edit(project, add(HEAD, f"        {ON_A_PARAMETER[hung]}\n"))
    assert "head.linear.weight has a hook or attribute" in refuse(project)
    assert not read_records(project / "run", "train")


EACH = ("optim.py", "    for parameter in module.parameters():\n")


def test_a_hook_on_a_shard_is_refused(bake: Bake) -> None:
    project = bake(parallelism="fsdp")
    edit(project, {EACH: f"{EACH[1]}        parameter.register_hook(lambda gradient: gradient * 2)\n"})
    assert "has a hook or attribute" in refuse(project)


def test_an_optimizer_draws_the_same_on_all_ranks(bake: Bake) -> None:
    project = bake()
    drawn = "parameter.data += 0.001 * torch.randn_like(parameter)"
    hook = f"    optimizer = torch.optim.{OPTIMIZER[1]}\n    optimizer.register_step_post_hook(draw)\n"
    hook += "    return optimizer\n"
    hook += (
        f'\n\ndef draw(optimizer, *_):\n    for parameter in optimizer.param_groups[0]["params"]:\n        {drawn}\n'
    )
    edit(project, {("optim.py", f"    return torch.optim.{OPTIMIZER[1]}\n"): hook})
    for nproc in (1, 2):
        words = ["--data.micro_batch_size", "8", "--run.dir", f"run{nproc}"]
        launch(project, *SMALL, *words, nproc=nproc)
    assert read_losses(project / "run1") == read_losses(project / "run2")


def test_a_buffer_may_be_built_by_the_first_micro_batch(bake: Bake) -> None:
    project = bake()
    built = (
        "        if not hasattr(self, 'scale'):\n            self.register_buffer('scale', features.new_ones(4)[::2])\n"
    )
    edit(project, {POOLED: built + POOLED[1]})
    run_alone(project, *SMALL, "--run.dir", "run")
