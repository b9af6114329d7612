"""Odd experiments under every strategy: as on one rank, and as without a stop; or refused by a line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHOICES, Bake, edit, launch, read_losses, read_records, render, run
from test_reports import BUILD, COUNTING, HEAD, IMPORTED, MEASURED, OPTIMIZER, POOLED, STEM, Changes

pytestmark = [pytest.mark.weekly, pytest.mark.independent]

STEPS = 6
SETTINGS = {
    "train.max_steps": STEPS,
    "train.log_every": 1,
    "train.eval_every": 2,
    "data.global_batch_size": 32,
    "model.width": 8,
    "model.depth": 1,
    "distributed.device": "cpu",
}
WORDS = ["train", *(word for name, value in SETTINGS.items() for word in (f"--{name}", str(value)))]
STRATEGIES = CHOICES["parallelism"]
# Two ranks share the work in the way of the strategy, or with it another dimension.
RANKS = {"data_parallel": 1, "mesh": 4}
LAYOUTS = {"mesh": ["--parallel.tensor", "2"]}

EXPERTS = """        features = features.mean(dim=(2, 3))
        logits = features.new_zeros(len(features), CLASSES)
        route = features.detach().argmax(dim=1) % len(self.experts)
        for number, expert in enumerate(self.experts):
            rows = route == number
            if rows.any():
                logits = logits.index_put((rows,), expert(features[rows]))
        return logits
"""
MOMENTUM = """        features = features.mean(dim=(2, 3))
        if self.training:
            with torch.no_grad():
                self.slow.weight.lerp_(self.linear.weight, 0.5)
        return self.linear(features) + self.slow(features)
"""
LORA = """        self.linear = nn.Linear(width, CLASSES).requires_grad_(False)
        self.down = nn.Linear(width, 2, bias=False)
        self.up = nn.Linear(2, CLASSES, bias=False)
"""
# An optimizer that makes an empty entry for each parameter, also for those without gradients, as schedule-free ones do.
AVERAGING = """

class Averaging(torch.optim.Optimizer):
    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr, "k": 0})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    z = state.setdefault("z", parameter.clone())
                    z.sub_(parameter.grad, alpha=group["lr"])
                    parameter.lerp_(z, 1 / group["k"])
"""
# Classes that are added to optim.py.
OPTIMIZERS = {"numbers in param_groups": COUNTING.replace("FACTOR", "1.5"), "empty entries": AVERAGING}
NOISY = '        losses = F.cross_entropy((outputs + torch.randn_like(outputs)).float(), targets, reduction="none")\n'
EXPERIMENTS: dict[str, Changes] = {
    "a hook on a parameter": {
        HEAD: HEAD[1] + "        self.linear.weight.register_hook(\n"
        "            lambda gradient: gradient * (gradient.new_ones(CLASSES).cumsum(0) > 5)[:, None]\n        )\n"
    },
    "experts that get no sample": IMPORTED
    | {
        HEAD: "        self.experts = nn.ModuleList(nn.Linear(width, CLASSES) for _ in range(3))\n",
        POOLED: EXPERTS,
    },
    "weights drawn after wrap": {
        BUILD: "    for block in blocks.values():\n        for parameter in block.parameters():\n"
        "            if parameter.dim() > 1:\n                nn.init.normal_(parameter, std=0.1)\n" + BUILD[1]
    },
    "a part in eval mode": {
        STEM: "        self.norm = nn.BatchNorm2d(width)\n        self.norm.weight.requires_grad_(False)\n",
        BUILD: "    blocks['stem'].eval()\n" + BUILD[1],
    },
    "a momentum encoder": IMPORTED
    | {
        HEAD: HEAD[1] + "        self.slow = nn.Linear(width, CLASSES, bias=False).requires_grad_(False)\n",
        POOLED: MOMENTUM,
    },
    "spectral norm": {
        HEAD: "        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(width, CLASSES))\n"
    },
    "numbers in param_groups": {("optim.py", f"torch.optim.{OPTIMIZER[1]}"): "Counting(groups, lr=config.lr)"},
    "empty entries": {("optim.py", f"torch.optim.{OPTIMIZER[1]}"): "Averaging(groups, lr=config.lr)"},
    "adapters of frozen weights": {
        HEAD: LORA,
        POOLED: "        features = features.mean(dim=(2, 3))\n"
        "        return self.linear(features) + self.up(self.down(features))\n",
    },
    "random numbers in evaluation": {MEASURED: NOISY},
    "two blocks with one weight": {
        BUILD: '    blocks["narrow0"].conv2.weight = blocks["narrow0"].conv1.weight\n'
        '    blocks["wide0"].norm1 = blocks["wide0"].norm2\n' + BUILD[1]
    },
    "a layer that is used twice": {
        POOLED: "        features = features.mean(dim=(2, 3))\n"
        "        for _ in range(2):\n            features = features + self.again(features)\n"
        "        return self.linear(features)\n",
        HEAD: HEAD[1] + "        self.again = nn.Linear(width, width)\n",
    },
    "a hook on the model": {
        BUILD: "    model = nn.Sequential(blocks)\n"
        "    model.register_forward_hook(lambda model, inputs, outputs: outputs * 2)\n    return model\n"
    },
}


def result(run_dir: Path) -> dict[str, Any]:
    """Return the losses of all steps and evaluations, and the final weights."""
    losses = [record["loss"] for event in ("train", "eval") for record in read_records(run_dir, event)]
    content = torch.load(run_dir / "checkpoints" / f"step-{STEPS:08}.pt", weights_only=True)
    return {"losses": losses, "model": content["model"]}


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[float, float]:
    """Return the largest relative deviations of losses, and of all weights together."""
    loss = max(abs(mine / other - 1) for mine, other in zip(ours["losses"], theirs["losses"], strict=True))
    squares = sum(float((ours["model"][name] - value).square().sum()) for name, value in theirs["model"].items())
    norm = sum(float(value.square().sum()) for value in theirs["model"].values())
    return loss, (squares / norm) ** 0.5


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return by experiment what DDP gives on one rank."""
    known: dict[str, Any] = {}

    def on_one_rank(name: str) -> dict[str, Any]:
        if name not in known:
            project = render(tmp_path_factory.mktemp("one"))
            prepare(project, name)
            launch(project, *WORDS, "--run.dir", "run", nproc=1)
            known[name] = result(project / "run")
        return known[name]

    return on_one_rank


def prepare(project: Path, name: str) -> None:
    edit(project, EXPERIMENTS[name])
    if name in OPTIMIZERS:
        file = next((project / "src").iterdir()) / "optim.py"
        file.write_text(file.read_text() + OPTIMIZERS[name])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_odd_experiment_is_right_or_refused(bake: Bake, expected: Any, name: str, strategy: str) -> None:
    project, nproc = bake(parallelism=strategy), RANKS.get(strategy, 2)
    prepare(project, name)
    words = [*WORDS, *LAYOUTS.get(strategy, []), "--data.micro_batch_size", "8"]
    script = 'scripts/launch.sh "$@"; echo "code $?"'
    out = run("bash", "-c", script, "bash", *words, "--run.dir", "straight", cwd=project, NPROC=str(nproc))
    if "code 2" in out.stdout:
        # PyTorch may warn before, such as of a layer in plan.py that the model lacks.
        errors = re.findall("^error: (.*)", out.stderr, re.MULTILINE)
        # Rank 0 repeats what another rank alone reports.
        reason = min(errors, key=len)
        assert len(errors) <= 2 and all(error.endswith(reason) for error in errors), errors
        pytest.skip(f"refused: {reason}")
    if "code 1" in out.stdout:
        # A tensor that plan.py shards, or one without values, does not take every operation: PyTorch says so.
        assert "model.py" in out.stderr or "DTensor" in out.stderr, out.stderr
        pytest.skip(f"error: {out.stderr.splitlines()[-1]}")
    assert "code 0" in out.stdout, out.stderr
    loss, weights = differences(result(project / "straight"), expected(name))
    print("DEVIATION", name, strategy, loss, weights)
    assert loss < 1e-5 and weights < 1e-4
    if (project / "scripts" / "rehearse.py").exists():
        rehearsed = run("scripts/launch.sh", "rehearse", "--ranks", str(nproc), *words[1:], cwd=project).stdout
        assert "messages match" in rehearsed
    for steps in (STEPS // 2, STEPS):
        launch(project, *words, "--run.dir", "run", "--train.max_steps", str(steps), nproc=nproc)
    assert read_losses(project / "run") == read_losses(project / "straight")
