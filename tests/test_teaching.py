"""The pages that teach do what they say: each command is run as written, each mistake is planted, each diff applied."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from commands import BIN
from conftest import CHOICES, Bake, leave_to_weekly, run
from documents import fences
from runs import free_port, losses, records
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

TOLERANCE = 1e-5
ANSWER = re.compile(r"^`(test_\w+)` fails", re.MULTILINE)


def page(project: Path, name: str) -> str:
    """Return a page of a project's ``docs/``."""
    return (project / "docs" / f"{name}.md").read_text()


def patch(project: Path, diff: str, *words: str) -> None:
    """Apply a diff as a reader does; each line of it has to be there."""
    line = ["patch", "--fuzz=0", "--no-backup-if-mismatch", *words]
    done = subprocess.run(line, cwd=project, input=diff, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{done.stdout}\n{diff}"


def shell(project: Path, script: str, expect: int = 0) -> str:
    """Run a script as a reader pastes it, with this interpreter as the project's; return what it printed."""
    script = script.replace(".venv/bin/", f"{BIN}/")
    done = run("bash", "-uc", script, cwd=project, expect=expect, PYTHONPATH="src", OMP_NUM_THREADS="1")
    return done.stdout + done.stderr


# Structure: these train nothing.


@pytest.mark.parametrize("parallelism", CHOICES["parallelism"])
def test_the_readme_has_a_diagram_of_one_step(bake: Bake, parallelism: str) -> None:
    (diagram,) = fences((bake(parallelism=parallelism) / "README.md").read_text(), "mermaid")
    kind, *lines = [line.strip() for line in diagram.splitlines()]
    text = "\n".join(lines)
    if kind == "sequenceDiagram":
        ranks = set(re.findall(r"^participant (\w+) as ", text, re.MULTILINE))
        messages = re.findall(r"^(\w+)-?->>(\w+): \S", text, re.MULTILINE)
        notes = re.findall(r"^Note over ([\w,]+): \S", text, re.MULTILINE)
        assert len(ranks) + len(messages) + len(notes) == len(lines), "a line of another kind"
        assert {name for message in messages for name in message} == ranks
        assert {name for note in notes for name in note.split(",")} <= ranks
    else:
        assert kind == "flowchart LR" and text.count("subgraph") == text.count("\nend")
        nodes = set(re.findall(r"(?<!\S)(\w+)(?=[(\[])", text))
        # The end of an arrow may be the start of the next.
        edges = re.findall(r"(\w+)(?:\[[^\]]*\])? (?:<?--(?: [^>]+? --)?>|-\. [^>]+? \.->) (?=(\w+))", text)
        assert len(edges) == text.count("->") and {name for edge in edges for name in edge} <= nodes, (
            "an edge to no node"
        )


@pytest.mark.parametrize("parallelism", CHOICES["parallelism"])
@pytest.mark.parametrize("task", CHOICES["task"])
def test_each_diff_fits_the_project(bake: Bake, parallelism: str, task: str) -> None:
    project = bake(parallelism=parallelism, task=task)
    mistakes = fences(page(project, "exercises"), "diff")
    assert len(mistakes) == (7 if parallelism == "data_parallel" else 8)
    for diff in mistakes:
        patch(project, diff, "-p1")
        patch(project, diff, "-p1", "-R")
    if task != "control":
        write_loop(project)
        for diff in fences(page(project, "from_a_loop"), "diff"):
            patch(project, diff, "loop.py")
            compile((project / "loop.py").read_text(), "loop.py", "exec")


@contextmanager
def one_rank() -> Iterator[DeviceMesh]:
    """A process group of this process alone, and its mesh."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_an_optimizer_that_was_built_before_sharding_changes_nothing() -> None:
    with one_rank() as mesh:
        for early in (True, False):
            model = nn.Linear(4, 4)
            parameters = [*model.parameters()]
            fully_shard(model, mesh=mesh)
            optimizer = torch.optim.AdamW(parameters if early else model.parameters())
            before = model.weight.full_tensor().clone()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            assert torch.equal(before, model.weight.full_tensor()) == early


def test_a_layer_that_is_replaced_after_wrapping_is_not_averaged() -> None:
    with one_rank():
        for late in (True, False):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
            if not late:
                model[1] = nn.Linear(4, 3)
            ddp = nn.parallel.DistributedDataParallel(model)
            if late:
                model[1] = nn.Linear(4, 3)
            reduced: list[torch.Tensor] = []
            ddp.register_comm_hook(reduced, note_bucket)
            ddp(torch.ones(2, 4)).sum().backward()
            assert model[1].weight.grad is not None
            assert any(model[1].weight is parameter for parameter in reduced) != late


def note_bucket(reduced, bucket):  # Without annotations, because DDP would compare them with its own.
    """Note which parameters' gradients are to be all-reduced."""
    reduced += bucket.parameters()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def test_a_compiled_model_has_other_names() -> None:
    model = nn.Linear(2, 2)
    assert [*torch.compile(model, backend="eager").state_dict()] == ["_orig_mod.weight", "_orig_mod.bias"]
    model.forward = torch.compile(model.forward, backend="eager")
    assert [*model.state_dict()] == ["weight", "bias"]


# The pages, as written.

WALKS = [("ddp", "digits"), ("data_parallel", "digits"), ("pipeline", "language"), ("fsdp", "control")]


@pytest.mark.slow
@pytest.mark.parametrize(("parallelism", "task"), leave_to_weekly(WALKS, WALKS[1:]))
def test_the_walk(bake: Bake, parallelism: str, task: str) -> None:
    project = bake(parallelism=parallelism, task=task)
    output = shell(project, "\n".join(fences(page(project, "walk"), "bash")))
    differences = dict(re.findall(r"^step (\d+): losses .* relative difference (\S+)$", output, re.MULTILINE))
    assert [*differences] == ["1", "20", "50", "100", "200"]
    assert float(differences["1"]) < TOLERANCE and float(differences["20"]) < 10 * TOLERANCE
    assert "exit code 137" in output, output
    starts = [int(step) for step in re.findall(r"runs/killed: step (\d+) of 200", output)]
    assert starts[0] == 0 and 40 <= starts[1] < 200 and len(starts) == 2, output
    assert "bitwise equal: True in" in output
    assert losses(project / "runs/killed") == losses(project / "runs/two")


def mistakes(text: str) -> list[tuple[str, str, str]]:
    """Return the diff of each exercise, its command, and its answer."""
    pattern = r"^## \d.*?\n```diff\n(.*?)```\n\n```bash\n(.*?)\n```\n\n<details>.*?\n\n(.*?)\n\n</details>"
    return re.findall(pattern, text, re.MULTILINE | re.DOTALL)


# Of each strategy, the exercise that only it has; of ddp, all of them. Those that start no ranks are long.
NO_RANKS = [("ddp", "digits", 3), ("ddp", "digits", 5)]
EXERCISES = [
    *(("ddp", "digits", number) for number in (0, 1, 2, 4, 6)),
    *((name, "digits", 6) for name in ("fsdp", "model_parallel", "pipeline", "tensor")),
    *(("data_parallel", "digits", number) for number in (0, 4)),
    *(("ddp", "language", number) for number in (0, 4)),
    *(("ddp", "control", number) for number in (0, 1, 4)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("parallelism", "task", "number"), leave_to_weekly([*NO_RANKS, *EXERCISES], EXERCISES))
def test_a_mistake_is_caught_by_the_test_that_the_answer_names(
    bake: Bake, parallelism: str, task: str, number: int
) -> None:
    project = bake(parallelism=parallelism, task=task)
    diff, command, answer = mistakes(page(project, "exercises"))[number]
    patch(project, diff, "-p1")
    test = ANSWER.match(answer)
    assert test is not None, answer
    output = shell(project, f"{command} -p no:cacheprovider", expect=1)
    failed = re.findall(r"^FAILED \S+::(\w+)", output, re.MULTILINE)
    assert failed and set(failed) == {test[1]}, output
    if "and passes with 2 ranks" in answer:
        assert len(failed) == 1 and re.search(r"^FAILED .*replicas", output, re.MULTILINE), output


@pytest.mark.slow
@pytest.mark.weekly
@pytest.mark.parametrize("parallelism", CHOICES["parallelism"])
def test_clipping_before_unscaling_clips_the_scaled_gradient(bake: Bake, parallelism: str) -> None:
    project = bake(parallelism=parallelism)
    text = page(project, "exercises").partition("## Where the order matters")[2]
    (diff,), (commands,) = fences(text, "diff"), fences(text, "bash")
    norms = []
    for _ in range(2):
        norms.append(float(re.findall(r'^"grad_norm": (\S+)', shell(project, commands), re.MULTILINE)[-1]))
        shell(project, "rm -r runs/order")
        if len(norms) == 1:
            patch(project, diff, "-p1")
    assert norms[1] == pytest.approx(65536 * norms[0], rel=1e-3)


@pytest.mark.slow
@pytest.mark.weekly
def test_the_schedule_moves_after_the_step(bake: Bake) -> None:
    project = bake()
    lines = (
        "        self.scaler.step(self.optimizer)\n        self.scaler.update()\n",
        "        self.scheduler.step()\n",
    )
    file = project / "src/my_experiment/train.py"
    assert "".join(lines) in file.read_text()
    file.write_text(file.read_text().replace("".join(lines), "".join(lines[::-1])))
    output = shell(project, ".venv/bin/pytest -p no:cacheprovider tests/test_split.py", expect=1)
    assert "loss of step 2 is the first to differ" in output


def write_loop(project: Path) -> None:
    """Write the loop with which the page begins."""
    (project / "loop.py").write_text(fences(page(project, "from_a_loop"), "python")[0])


LOOPS = [*((name, "digits") for name in CHOICES["parallelism"]), ("fsdp", "language")]


@pytest.mark.slow
@pytest.mark.parametrize(("parallelism", "task"), leave_to_weekly(LOOPS, LOOPS[1:]))
def test_a_loop_becomes_this_repository(bake: Bake, parallelism: str, task: str) -> None:
    project = bake(parallelism=parallelism, task=task)
    text = page(project, "from_a_loop")
    assert len(losses_of(shell(project, start(project, text)))) == 3
    results = []
    for step, diff in enumerate(fences(text, "diff"), start=1):
        patch(project, diff, "loop.py")
        (commands,) = fences(text.split("\n## ")[step], "bash") or [""]
        several = parallelism != "data_parallel" and step in (2, 3)
        if several:
            commands = next(block for block in fences(text, "bash") if "WORLD_SIZE" in block)
            commands = commands.replace("29513", str(free_port()))
        output = shell(project, commands or ".venv/bin/python loop.py")
        results.append(losses_of(output))
        if step == 3:
            assert "num_samples" in output
    for ours in results[1:3]:  # Two ranks, and where the samples come from no longer changes.
        assert ours == pytest.approx(results[0], rel=10 * TOLERANCE)
    assert len(results[3]) == 3 and len(results[4]) == 4 and results[4][:3] == results[3]
    assert "largest difference of a weight: 0.0" in shell(project, fences(text.split("\n## ")[-1], "bash")[0])
    assert records(project / "runs/train", "train")[-1]["step"] == 80


def losses_of(output: str) -> list[float]:
    """Return the losses that the loop printed."""
    return [float(loss) for loss in re.findall(r"^step \d+, epoch \d+: loss (\S+)", output, re.MULTILINE)]


def start(project: Path, text: str) -> str:
    """Write the first loop, and return the command that starts it."""
    write_loop(project)
    return fences(text, "bash")[0]
