"""docs/from-a-loop.md, finish-the-loop.md, loop-on-gpus.md: diffs apply, and each loop prints what the pages show."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import BIN, TEMPLATE, Bake, blocks, free_ports, launch, run, run_python, started
from torch.utils.data import DataLoader, DistributedSampler

DOCS = TEMPLATE / "docs"
LOOP, PREDICT = (DOCS / "finish-the-loop.md").read_text().split("## Predict with the trained model")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def assert_same(printed: str, shown: str) -> None:
    """Assert that a program prints the lines of a block, in any order of ranks, and losses to 0.01."""
    lines = [sorted(line for line in text.splitlines() if line) for text in (printed, shown)]
    losses = [[float(loss) for loss in re.findall(r"loss (\S+)", "\n".join(each))] for each in lines]
    assert [re.sub("loss .*", "", line) for line in lines[0]] == [re.sub("loss .*", "", line) for line in lines[1]]
    assert losses[0] == pytest.approx(losses[1], abs=0.01)


@pytest.mark.weekly
def test_each_loop_and_each_exercise_prints_what_the_pages_show(bake: Bake) -> None:
    project, printed, commands = bake(), "", 0
    (project / ".venv").symlink_to(BIN.parent)
    for name in ("from-a-loop", "finish-the-loop", "loop-on-gpus"):
        page = (DOCS / f"{name}.md").read_text().split("## Predict with the trained model")[0]
        for kind, text in BLOCK.findall(page):
            if kind == "python":
                (project / ("gpu_loop.py" if name == "loop-on-gpus" else "loop.py")).write_text(text)
                assert len(text.splitlines()) <= (70 if name == "loop-on-gpus" else 30)
            elif kind == "diff":
                (project / "edit.diff").write_text(text)
                run("patch", "--fuzz=0", "loop.py", "edit.diff", cwd=project)
            elif kind == "bash":
                printed, commands = run("bash", "-ec", text, cwd=project).stdout, commands + 1
            else:
                assert kind == "text"
                assert_same(printed, text)
    assert commands == 20


@pytest.mark.weekly
def test_losses_of_1_2_and_4_ranks_are_one_curve(bake: Bake) -> None:
    project, page = bake(), (DOCS / "from-a-loop.md").read_text()
    for kind, text in BLOCK.findall(page):
        if kind in ("python", "diff"):
            (project / ("loop.py" if kind == "python" else "edit.diff")).write_text(text)
        if kind == "diff":
            run("patch", "--fuzz=0", "loop.py", "edit.diff", cwd=project)
    out = run(BIN / "python", DOCS / "losses.py", "losses.svg", cwd=project, OMP_NUM_THREADS="1").stdout
    found = re.findall(r"^(\d) ranks differ from one by at most (\S+) in (\d+) steps$", out, re.MULTILINE)
    (steps,) = re.findall(r"draws the losses of all (\d+) steps", page)
    assert [(ranks, count) for ranks, _, count in found] == [("2", steps), ("4", steps)]
    assert all(float(difference) < 1e-5 for _, difference, _ in found)
    curves = []
    for path in (DOCS / "losses.svg", project / "losses.svg"):
        panel = path.read_text().split('<g id="axes_2">')[0]
        lines = re.findall(r'^   <g id="line2d_\d+">\n    <path d="(.*?)"', panel, re.MULTILINE | re.DOTALL)
        curves += [[float(y) for y in re.findall(r"[ML] \S+ (\S+)", line)] for line in lines]
    assert [len(curve) for curve in curves] == [int(steps)] * 6
    assert all(curve == pytest.approx(curves[0], abs=0.5) for curve in curves), "run docs/losses.py"


def test_an_epoch_has_the_steps_of_the_answer() -> None:
    page = (DOCS / "from-a-loop.md").read_text()
    samples = range(int(re.findall(r"an epoch of these ([\d,]+) samples", page)[0].replace(",", "")))
    steps, batch, fewer = map(int, re.findall(r"^2. (\d+) on any .* is (\d+), and an epoch has (\d+) ", page, re.M)[0])
    for ranks, size, expected in ((1, 64, steps), (2, 32, steps), (4, 16, steps), (4, 64, fewer)):
        sampler = DistributedSampler(samples, num_replicas=ranks, rank=0, drop_last=True)
        assert len(DataLoader(samples, size, sampler=sampler, drop_last=True)) == expected
        assert size * ranks == (batch if size * ranks > 64 else 64)


@pytest.mark.weekly
def test_launchers_of_two_machines_start_one_run(bake: Bake) -> None:
    project, page = bake(), DOCS / "loop-on-gpus.md"
    (program,) = blocks(page, "python")
    (project / "gpu_loop.py").write_text(program)
    flags = r"`(--nnodes \S+ --node-rank) 0` [^`]*`(--master-addr) HEAD (--master-port) \d+`"
    nodes, address, port = re.findall(flags, page.read_text())[0]
    flags = f"{address} localhost {port} {free_ports(1)[0]} --nproc-per-node 1 gpu_loop.py"
    commands = [f"{nodes} {number} {flags}".split() for number in range(2)]
    with started(BIN / "torchrun", *commands[0], cwd=project, OMP_NUM_THREADS="1") as launcher:
        second = run(BIN / "torchrun", *commands[1], cwd=project, OMP_NUM_THREADS="1").stdout
        printed = f"{launcher.communicate()[0]}{second}"
    shown = next(block for block in blocks(page, "text") if "epoch 2" in block)
    assert_same("\n".join(re.findall(r"^.*epoch 2.*|^.*right$", printed, re.MULTILINE)), shown)


@pytest.mark.weekly
def test_without_no_sync_each_micro_batch_sends(bake: Bake) -> None:
    project = bake()
    (program,) = blocks(DOCS / "loop-on-gpus.md", "python")
    hook = (
        "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook\ncalls = []\n"
        "ddp.register_comm_hook(None, lambda state, bucket: (calls.append(1), allreduce_hook(state, bucket))[1])\n"
    )
    assert program.count("optimizer = ") == program.count("images, labels = (tensor.to(device) for") == 1
    program = program.replace("optimizer = ", f"{hook}optimizer = ", 1)
    program = program.replace(
        "images, labels = (tensor.to(device) for", 'print("calls", len(calls))\nimages, labels = (tensor.to(device) for'
    )
    shown = re.findall(r"(\d+) times per epoch instead of (\d+)", (DOCS / "loop-on-gpus.md").read_text())[0]
    for text, each in ((program.replace("ddp.no_sync()", "nullcontext()"), shown[0]), (program, shown[1])):
        (project / "counted.py").write_text(text)
        out = run(BIN / "torchrun", "--standalone", "--nproc-per-node", "1", "counted.py", cwd=project).stdout
        assert f"calls {3 * int(each)}\n" in out
        (project / "model.pt").unlink()


def test_what_the_page_names_exists(bake: Bake) -> None:
    project = bake()
    code = {path.name: path.read_text() for path in Path(project / "src" / "my_experiment").glob("*.py")}
    rows = re.findall(r"^\| .*? \| `(\w+\.py)`: (.*?) \|", LOOP, re.MULTILINE)
    assert len(rows) > 3
    for file, names in rows:
        assert all(name.split(".")[-1] in code[file] for name in re.findall(r"`([^`]+)`", names))


def test_an_exported_model_predicts_with_its_own_settings(bake: Bake) -> None:
    project = bake()
    (project / ".venv").symlink_to(BIN.parent)
    (export,), (lines,) = (re.findall(rf"^```{kind}\n(.*?)^```$", PREDICT, re.M | re.S) for kind in ("sh", "py"))
    assert len(lines.splitlines()) <= 10
    words = "--train.max_steps 60 --model.width 8 --model.depth 1 --distributed.device cpu".split()
    launch(project, "train", *words, nproc=1)  # No default of ModelConfig or of configs/default.yaml.
    run("bash", "-ec", export, cwd=project)
    arrays = np.load(project / "src" / "my_experiment" / "digits.npz")
    (images,) = re.findall("^images = .*\n", lines, re.M)
    lines = lines.replace(images, 'images = torch.load("images.pt")\n')
    torch.save(torch.from_numpy(arrays["test_images"]).float()[:, None] / 16, project / "images.pt")
    predictions = np.array(json.loads(run_python(project, lines)))
    evaluated = launch(
        project, "evaluate", "--checkpoint", "runs/default", "--distributed.device", "cpu", nproc=1
    ).stdout
    accuracy = json.loads(evaluated.splitlines()[-1])["accuracy"]
    assert (predictions == arrays["test_labels"]).mean() == pytest.approx(accuracy) and accuracy > 0.2
