"""What a run leaves is complete, right and its own: checkpoints in both formats, exports, pictures, traces."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path
from signal import SIGTERM
from typing import Any

import numpy as np
import pytest
import torch
from conftest import (
    Bake,
    edit,
    launch,
    launch_and_kill,
    launch_on_full_disk,
    read_losses,
    read_records,
    run_alone,
    run_python,
    started,
    wait_until,
    weekly,
)
from lines import LOSSES, STEM, after, before, instead
from safetensors.torch import load_file

pytestmark = [pytest.mark.long, pytest.mark.independent]

STEPS = 8
SMALL = f"train --train.max_steps {STEPS} --train.log_every 1 --data.global_batch_size 32".split()
SMALL += ["--distributed.device", "cpu"]
SHARDED = "--checkpoint.format sharded --checkpoint.every_steps 2".split()


def train(project: Path, *words: str, **options: Any) -> str:
    """Train in the folder run, on two ranks; returns what was reported."""
    return launch(project, *SMALL, "--run.dir", "run", *words, **options).stderr


def train_alone(project: Path, *words: str, **options: Any) -> str:
    """Train in the folder run, in one process; returns what was reported."""
    return run_alone(project, *SMALL, "--run.dir", "run", *words, **options).stderr


def names(project: Path) -> list[str]:
    """Return the checkpoints, complete or not, in the order of their names."""
    return sorted(path.name for path in (project / "run" / "checkpoints").glob("step-*"))


def test_the_newest_checkpoints_and_the_best_one_are_kept(bake: Bake) -> None:
    project = bake()
    train_alone(
        project, "--train.eval_every", "1", "--checkpoint.keep", "1", "--optim.lr", "3e-2", "--optim.warmup_steps", "1"
    )
    accuracy = {record["step"]: record["accuracy"] for record in read_records(project / "run", "eval")}
    best = max(accuracy, key=lambda step: (accuracy[step], -step))
    assert len(set(accuracy.values())) > 2
    assert names(project) == [f"step-{step:08d}.pt" for step in sorted({best, STEPS})] and best < STEPS
    evaluate = ["evaluate", "--distributed.device", "cpu", "--checkpoint"]
    evaluated = [
        run_alone(project, *evaluate, f"run{path}").stdout for path in ("", f"/checkpoints/step-{best:08d}.pt")
    ]
    assert evaluated[0] == evaluated[1] and json.loads(evaluated[0])["step"] == best


def test_a_folder_belongs_to_one_run(bake: Bake) -> None:
    project = bake()
    words = [*SMALL, "--train.epochs", "500", "--train.max_steps", "20000", "--run.dir", "run"]
    with started(project / "scripts/launch.sh", *words, cwd=project, NPROC="2"):
        wait_until(lambda: read_losses(project / "run"), "the run has started")
        assert "run is in use by another run" in train_alone(project, code=2)


@pytest.mark.weekly
def test_a_run_whose_folder_was_moved_does_not_write_into_another_run(bake: Bake) -> None:
    project, seldom = bake(), "3000"
    words = [*SMALL, "--train.epochs", "500", "--train.max_steps", "20000", "--run.dir", "run"]
    words += ["--train.log_every", seldom, "--checkpoint.every_steps", seldom]
    with started(project / "scripts/launch.sh", *words, cwd=project, NPROC="2") as first:
        wait_until((project / "run" / "metrics.jsonl").exists, "the run has started")
        (project / "run").rename(project / "moved")
        train_alone(project)
        saved = names(project)
        _, err = first.communicate(timeout=600)
    assert err == "error: run was moved, and is another run's now\n" and first.returncode == 2, err
    assert names(project) == saved


@pytest.mark.parametrize(("parallelism", "words"), [("ddp", []), *weekly(("fsdp", SHARDED))])
def test_a_full_disk_costs_no_checkpoint_that_was_complete(bake: Bake, parallelism: str, words: list[str]) -> None:
    """A limit of the size of a file takes the place of the full disk."""
    project = bake(parallelism=parallelism)
    train(project, "--train.max_steps", "4", *words)
    before, losses = names(project), read_losses(project / "run")
    err = launch_on_full_disk(project, *SMALL, "--run.dir", "run", *words)
    *first, last = err.splitlines()
    assert all("disk full?" in line for line in (*first, last)) and "the run continues" not in last, err
    assert len(first) == (1 if words else 0) and all("the run continues" in line for line in first), err
    assert names(project) == before
    train_alone(project, *words)
    assert read_losses(project / "run")[:4] == losses and len(read_losses(project / "run")) == STEPS


def change_saves(folder: Path, words: list[str], what: str) -> dict[str, str]:
    """Return an environment in which something happens before each save; ``calls`` has one entry for each."""
    owner = "torch.distributed.checkpoint" if words else "torch"
    (folder / "sitecustomize.py").write_text(
        "import os\n"
        "if 'RANK' in os.environ:\n"
        f"    import time, {owner} as owner\n"
        "    save, calls = owner.save, []\n"
        "    def changed(*words, **options):\n"
        "        calls.append(0)\n"
        f"        {what}\n"
        "        return save(*words, **options)\n"
        "    owner.save = changed\n"
    )
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize(("parallelism", "words"), [("fsdp", SHARDED[:2]), *weekly(("ddp", []))])
def test_a_run_that_is_killed_while_it_saves_resumes_bitwise(
    bake: Bake, tmp_path: Path, parallelism: str, words: list[str]
) -> None:
    project, steps = bake(parallelism=parallelism), ["--train.max_steps", "100", "--train.epochs", "20"]
    slow = change_saves(tmp_path, words, "time.sleep(2)")
    words = [*SMALL, *steps, *words, "--checkpoint.every_steps", "4"]
    launch(project, *words, "--run.dir", "whole")

    def second_is_written() -> bool:
        return len(read_losses(project / "run")) > 8

    launch_and_kill(project, *words, "--run.dir", "run", when=second_is_written, **slow)
    assert [name[5:13] for name in names(project) if "tmp" not in name] == ["00000004"]
    launch(project, *words, "--run.dir", "run")
    assert read_losses(project / "run") == read_losses(project / "whole")


@pytest.mark.parametrize(("parallelism", "words"), [("ddp", []), *weekly(("fsdp", SHARDED[:2]))])
def test_a_save_may_take_longer_than_messages(bake: Bake, tmp_path: Path, parallelism: str, words: list[str]) -> None:
    project = bake(parallelism=parallelism)
    slow = change_saves(tmp_path, words, "time.sleep(12 * (os.environ['RANK'] == '0'))")
    err = train(project, *words, "--distributed.timeout_seconds", "6", "--checkpoint.every_steps", "4", **slow)
    assert not err and [name[5:13] for name in names(project)] == ["00000004", "00000008"]


@pytest.mark.parametrize("words", [SHARDED[:2], *weekly([])])
def test_another_model_costs_no_checkpoint(bake: Bake, words: list[str]) -> None:
    project = bake(parallelism="fsdp")
    train_alone(project, *words)
    edit(project, after(STEM, "self.scale = nn.LayerNorm(1)"))
    err, before = train_alone(project, *words, "--train.max_steps", "9", code=2), names(project)
    assert "scale" in err and err.count("\n") == 1 and before[-1].startswith("step-00000008."), err
    newest = f"run/checkpoints/{before[-1]}"
    err = run_alone(project, "evaluate", "--distributed.device", "cpu", "--checkpoint", newest, code=2).stderr
    assert "scale" in err and names(project) == before and err.count("\n") == 1, err


@pytest.mark.parametrize(("parallelism", "words"), [("ddp", []), *weekly(("fsdp", SHARDED[:2]))])
def test_a_save_that_fails_is_reported_and_costs_no_other(
    bake: Bake, tmp_path: Path, parallelism: str, words: list[str]
) -> None:
    project = bake(parallelism=parallelism)
    fails_once = change_saves(tmp_path, words, "assert len(calls) > 1, 'planted'")
    err = train(project, *words, "--checkpoint.every_steps", "4", "--checkpoint.keep", "9", **fails_once)
    assert "step-00000004" in err and "planted; the run continues" in err and err.count("\n") == 1, err
    assert [name[5:13] for name in names(project) if "tmp" not in name] == [f"{STEPS:08d}"]


def damage(path: Path) -> None:
    """Overwrite a checkpoint, or a part of a sharded one."""
    (path / "__1_0.distcp" if path.is_dir() else path).write_bytes(b"damaged")


READ = """
import random
from pathlib import Path
from my_experiment.config import UserError
from my_experiment.sharded import Checkpointer

(folder,) = Path("run/checkpoints").glob("*.dcp")
generator, counts = random.Random(0), [0, 0]
for name in (".metadata", "header.json"):
    whole = (folder / name).read_bytes()
    for number in range(400):
        damaged = bytearray(whole)
        place = generator.randrange(len(whole))
        damaged[place : place + generator.choice([1, 2, 500])] = generator.randbytes(1 + number % 3)
        (folder / name).write_bytes(damaged)
        try:
            Checkpointer.read(folder)
            counts[0] += 1
        except UserError:
            counts[1] += 1
    (folder / name).write_bytes(whole)
print(*counts)
"""


def test_damage_of_any_kind_to_a_sharded_checkpoint_is_found_or_does_not_matter(bake: Bake) -> None:
    project = bake(parallelism="fsdp")
    train_alone(project, *SHARDED, "--train.max_steps", "2")
    read, refused = map(int, run_python(project, READ).split())
    assert read + refused == 800 and refused > 400


@pytest.mark.parametrize(("parallelism", "words"), [("ddp", []), *weekly(("fsdp", SHARDED))])
def test_a_run_whose_checkpoints_are_all_damaged_never_starts_anew(
    bake: Bake, parallelism: str, words: list[str]
) -> None:
    project = bake(parallelism=parallelism)
    start = train_alone if parallelism == "ddp" else train
    start(project, *words, "--checkpoint.every_steps", "4")
    records = read_records(project / "run")
    complete = names(project)
    for name in complete:
        damage(project / "run" / "checkpoints" / name)
    for _ in range(2):
        *_, last = start(project, *words, code=2).splitlines()
        assert last.startswith("error: ") and "all others are damaged" in last
        assert names(project) == [f"{name}.damaged" for name in complete]
        assert read_records(project / "run") == records
    shutil.rmtree(project / "run" / "checkpoints")
    start(project, *words)
    assert len(read_losses(project / "run")) == STEPS


def test_checkpoints_have_the_order_of_their_numbers(bake: Bake) -> None:
    project = bake()
    train_alone(project, "--train.max_steps", "4")
    folder = project / "run" / "checkpoints"
    (folder / "step-00000004.pt").rename(folder / "step-100000000.pt")
    damage(folder / "step-99999999.pt")
    out = run_alone(project, *SMALL, "--run.dir", "run").stdout
    assert "run: step 4 of 8" in out and not [name for name in names(project) if name.endswith(".damaged")]


@pytest.mark.parametrize("damage", [b'7\n{"event": "tr', *weekly(b"\0" * 700, b"\xff\n\x9d{}")])
def test_what_a_crash_of_the_machine_damaged_is_set_aside(bake: Bake, damage: bytes) -> None:
    """File systems may leave NULs, or nothing, where a machine has stopped before data was on the disk."""
    project = bake()
    train_alone(project, "--train.max_steps", "4")
    records = project / "run" / "metrics.jsonl"
    records.write_bytes(damaged := records.read_bytes() + damage)
    (project / "run" / "provenance.json").write_bytes(b"")
    (project / "run" / "checkpoints" / "step-00000009.pt.tmp").write_bytes(bytes(9))
    assert train_alone(project).splitlines() == [
        "run/metrics.jsonl has a damaged line; the best evaluation may be lost; it is now metrics.jsonl.damaged",
    ]
    assert (project / "run/metrics.jsonl.damaged").read_bytes() == damaged
    assert len(read_losses(project / "run")) == STEPS
    provenance = json.loads((project / "run" / "provenance.json").read_text())
    assert provenance["step"] == 4 and provenance["earlier"] == []
    assert not [name for name in names(project) if name.endswith(".tmp")] and not train_alone(project)


def test_a_run_whose_folder_is_removed_ends_with_an_error(bake: Bake) -> None:
    project = bake()
    words = [*SMALL, "--train.epochs", "500", "--train.max_steps", "20000", "--run.dir", "run"]
    with started(project / "scripts/launch.sh", *words, cwd=project, NPROC="2") as launcher:
        wait_until(lambda: read_losses(project / "run"), "the run has started")
        (project / "run").rename(project / "removed")  # All at once: the run may write a file while others go.
        shutil.rmtree(project / "removed")
        _, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 1 and "metrics.jsonl" in err, err


@pytest.mark.parametrize("parallelism", ["ddp", "fsdp"])
def test_weights_that_are_not_finite_are_not_saved(bake: Bake, parallelism: str) -> None:
    project = bake(parallelism=parallelism)
    words = ["--optim.lr", "3e37", "--optim.warmup_steps", "0", "--checkpoint.every_steps", "1"]
    err = train_alone(project, *words, *(SHARDED[:2] if parallelism == "fsdp" else []), code=2)
    assert "step 1 is not saved: weights are not finite" in err and err.count("\n") == 1, err
    assert not names(project)


def test_another_batch_size_is_refused_in_the_middle_of_a_run(bake: Bake) -> None:
    project = bake()
    train_alone(project, "--train.max_steps", "2")
    assert "data.global_batch_size is 64, and 32 in the checkpoint" in train_alone(
        project, "--data.global_batch_size", "64", code=2
    )


@pytest.mark.weekly
@pytest.mark.parametrize("parallelism", ["fsdp", "pipeline", "tensor", "mesh"])
def test_a_sharded_run_that_is_killed_resumes_bitwise(bake: Bake, parallelism: str) -> None:
    project = bake(parallelism=parallelism)
    launch(project, *SMALL, "--run.dir", "whole")
    words = [*SMALL, "--run.dir", "run", *SHARDED]
    launch_and_kill(project, *words, when=lambda: len(read_losses(project / "run")) > 4)
    train(project, *SHARDED)
    assert read_losses(project / "run") == read_losses(project / "whole")
    evaluate = ["evaluate", "--distributed.device", "cpu", "--checkpoint"]
    sharded, whole = (json.loads(run_alone(project, *evaluate, folder).stdout) for folder in ("run", "whole"))
    assert sharded["loss"] == pytest.approx(whole["loss"], rel=1e-6) and sharded["step"] == STEPS
    newest = Path("run/checkpoints") / names(project)[-1]
    damage(project / newest)
    err = run_alone(project, *evaluate, newest, code=2).stderr
    assert err.endswith(f"error: {newest} is not a readable checkpoint: a part of it is damaged or missing\n"), err
    for _ in range(2):  # Also if a damaged one of that step is there.
        damage(project / newest)
        assert f"it is now {newest.name}.damaged" in train(project, *SHARDED)


def test_saved_statistics_of_batch_norm_are_averages_over_the_ranks(bake: Bake) -> None:
    project = bake()
    saves = ("train.py", "        path = self.checkpointer.save(progress)\n")
    own = 'torch.save(self.parallel.module.state_dict(), f"rank{self.process.rank}.pt")'
    edit(project, instead(STEM, "self.norm = nn.BatchNorm2d(width)") | before(saves, own))
    train(project, "--data.global_batch_size", "36", nproc=3)
    saved = torch.load(project / "run" / "checkpoints" / names(project)[-1], weights_only=True)["model"]
    ranks = [torch.load(project / f"rank{rank}.pt", weights_only=True) for rank in range(3)]
    for name in ("stem.norm.running_mean", "stem.norm.running_var"):
        of_ranks = torch.stack([rank[name] for rank in ranks])
        assert of_ranks.std(dim=0).max() > 1e-4
        torch.testing.assert_close(saved[name], of_ranks.mean(dim=0), rtol=1e-6, atol=1e-6)


def test_each_rank_and_step_draws_other_numbers_and_the_same_ones_after_a_resume(bake: Bake) -> None:
    """In any precision, which is that of the outputs; only exact runs refuse what is not deterministic."""
    project = bake()
    drawn = (
        'with open(f"drawn-{torch.distributed.get_rank()}", "a") as file:',
        "    is_exact = torch.are_deterministic_algorithms_enabled()",
        '    file.write(f"{torch.rand(1).item()} {outputs.dtype} {is_exact}\\n")',
    )
    edit(project, before(LOSSES, *drawn))
    for steps in ("5", str(STEPS)):
        train(project, "--train.precision", "bf16", "--train.max_steps", steps)
    launch(project, *SMALL, "--run.dir", "whole", "--train.precision", "fp16", "--train.exact", "false")
    lines = [(project / f"drawn-{rank}").read_text().split() for rank in (0, 1)]
    ranks, again = ([line[: 3 * STEPS : 3] for line in lines], [line[3 * STEPS :: 3] for line in lines])
    assert len(set(ranks[0] + ranks[1])) == 2 * STEPS and again == ranks
    for line in lines:
        assert line[1::3] == ["torch.bfloat16"] * STEPS + ["torch.float16"] * STEPS
        assert line[2::3] == ["True"] * STEPS + ["False"] * STEPS
    newest = project / "whole" / "checkpoints" / f"step-{STEPS:08d}.pt"
    assert torch.load(newest, weights_only=True)["scaler"].get("scale", 0) >= 1


def test_weights_are_exported_runs_drawn_and_steps_traced(bake: Bake) -> None:
    project = bake()
    train(project, "--train.max_steps", "16", "--train.profile", "true")
    newest = project / "run" / "checkpoints" / names(project)[-1]
    model = torch.load(newest, weights_only=True)["model"]
    torch.save(model, project / "state_dict.pt")
    for file in (newest, "state_dict.pt"):
        run_alone(project, "export", "--checkpoint", file, "--output", "weights.safetensors")
        weights = load_file(project / "weights.safetensors")
        assert weights.keys() == model.keys() and all(torch.equal(weights[name], model[name]) for name in model)
    (project / "lost" / "checkpoints").mkdir(parents=True)
    (project / "lost" / "checkpoints" / "best").write_text("step-00000001.pt")  # Which is not there.
    no_run, no_folder = ["src", "--output", "a.safetensors"], [newest, "--output", "README.md/a.safetensors"]
    no_best = ["lost", "--output", "a.safetensors"]
    named_by = ((no_run, "a run.dir with a best one"), (no_best, "a run.dir with a best one"), (no_folder, "README.md"))
    for words, named in named_by:
        error = run_alone(project, "export", "--checkpoint", *words, code=2).stderr
        assert error.startswith("error: ") and error.count("\n") == 1 and named in error, error
    run_alone(project, "plot", "--runs", "[run]", "--output", "curves.png")
    assert (project / "curves.png").read_bytes().startswith(b"\x89PNG")
    traces = [json.loads(path.read_text()) for path in (project / "run").glob("*trace*.json")]
    assert len(traces) == 2 and all(len(trace["traceEvents"]) > 100 for trace in traces)


def test_a_picture_has_the_lines_of_all_runs_panel_by_panel(bake: Bake) -> None:
    project, panels = bake(), {}
    for run, factor in (("a", 1.0), ("b", 2.0)):
        train = [
            {"event": "train", "step": s, "loss": factor * (1 + s % 2), "rate": 10.0 ** (s % 4)} for s in range(60)
        ]
        metrics = [{"accuracy": [0.5, factor / 4], "loss": 90.0}, {"accuracy": [0.7, None], "loss": None, "once": 2.0}]
        metrics += [{"accuracy": [0.8, 0.6], "loss": 0.0, "names": ["x"], "matrix": [[0.1]], "count": 3}]
        metrics[0]["by_class"] = {"one": 0.5, "two": 0.25, "three": "x"}
        evaluations = [{"event": "eval", "step": 200 * n, **each} for n, each in enumerate(metrics, start=1)]
        (project / run).mkdir()
        (project / run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in train + evaluations))
    run_alone(project, "plot", "--runs", "[a, b]", "--output", "curves.svg")
    *drawn, legend = re.split(r'^  <g id="(?:axes|legend)_\d+">$', (project / "curves.svg").read_text(), flags=re.M)[1:]
    for panel in drawn:
        texts = re.findall("<!-- (.*?) -->", panel)
        lines = re.findall(r'^   <g id="line2d_\d+">\n(.*?)^   </g>', panel, re.M | re.S)
        points = [re.findall(r"[ML] (\S+) (\S+)", re.findall('<path d="(.*?)"', line, re.S)[0]) for line in lines]
        panels[texts[-1]] = (
            re.findall('<path d="M (\\S+)', panel)[0],
            texts[: texts.index("step")],
            texts,
            lines,
            points,
        )
    # In three columns; without what is no number, and without a list of lists.
    assert [*panels] == ["accuracy", "by_class", "loss", "once", "rate"]
    left, steps, _, lines, points = zip(*panels.values(), strict=True)
    assert left[:2] == left[3:] and len({*left}) == 3
    assert all(ticks == steps[0] and ticks[-1] == "600" for ticks in steps)  # Also those of training, with 60 steps.
    assert re.findall("<!-- (.*?) -->", legend) == ["a", "b"]
    colors = re.findall(r"stroke: (#\w+); stroke-width: 1.5", legend)
    for name, of_run in zip(panels, (2, 2, 2, 1, 1), strict=True):  # One line for each entry, or for each event.
        found = [re.findall(r"stroke: (#\w+)", line)[0] for line in panels[name][3]]
        assert len({*colors}) == 2 and found == [color for color in colors for _ in range(of_run)], name
    # A number is as high as it is large, and as far to the right as its step.
    steps, numbers = [200, 400, 600, 200, 600] * 2, [0.5, 0.7, 0.8, 0.25, 0.6, 0.5, 0.7, 0.8, 0.5, 0.6]
    columns, heights = zip(*((float(x), -float(y)) for line in points[0] for x, y in line), strict=True)
    assert np.corrcoef(columns, steps)[0, 1] > 1 - 1e-9 and np.corrcoef(heights, numbers)[0, 1] > 1 - 1e-9
    # A null is skipped. A line of evaluations is dashed, and has points, of which one alone is seen, too.
    assert [len(each) for each in points[0]] == [3, 2, 3, 2] and [len(each) for each in points[2][1::2]] == [2, 2]
    trained = [[False] * 4, [False] * 4, [True, False] * 2, [False] * 2, [True] * 2]
    assert [["<use" not in line for line in each] for each in lines] == trained
    assert [["dasharray" not in line for line in each] for each in lines] == trained


def test_a_stop_waits_for_no_record(bake: Bake) -> None:
    project = bake()
    rare = [word for name in ("max_steps", "log_every", "eval_every") for word in (f"--train.{name}", "20000")]
    words = [*SMALL, *rare, "--train.epochs", "500", "--run.dir", "run"]
    with started(project / "scripts/launch.sh", *words, cwd=project, NPROC="2") as launcher:
        wait_until((project / "run" / "provenance.json").exists, "the run begins")
        time.sleep(8)  # Some hundred steps.
        start = time.monotonic()
        launcher.send_signal(SIGTERM)
        out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 143 and "stopped after step" in out, (out, err)
    assert names(project) and time.monotonic() - start < 15  # Of which most is the save and the end of the processes.


def test_a_rank_0_that_is_stopped_while_others_wait_for_it_is_named(bake: Bake, tmp_path: Path) -> None:
    project = bake()
    stops = change_saves(tmp_path, [], "os.kill(os.getpid(), 19)")  # SIGSTOP, in the last save, which all wait for.
    words = ["--distributed.timeout_seconds", "6", "--train.log_every", "8"]
    start = time.monotonic()
    err = train(project, *words, code=1, STOP_SECONDS="3", **stops)
    assert "no report from rank(s) 0" in err and time.monotonic() - start < 60, err


def test_a_file_system_that_syncs_no_folder_will_do(bake: Bake, tmp_path: Path) -> None:
    """As CIFS and WSL's DrvFs refuse it."""
    project = bake()
    (tmp_path / "sitecustomize.py").write_text(
        "import os, stat\n"
        "fsync = os.fsync\n"
        "def refusing(descriptor):\n"
        "    if stat.S_ISDIR(os.fstat(descriptor).st_mode):\n"
        "        raise OSError(22, 'Invalid argument')\n"
        "    fsync(descriptor)\n"
        "os.fsync = refusing\n"
    )
    assert not train(project, PYTHONPATH=str(tmp_path)) and names(project)


ODD = {
    "pipe": lambda folder: os.mkfifo(folder / "step-00000099.pt"),
    "device": lambda folder: os.symlink("/dev/zero", folder / "step-00000099.pt"),
    "folder": lambda folder: (folder / "step-00000099.pt").mkdir(),
    "file": lambda folder: (folder / "step-00000099.dcp").write_text("x"),
    "digits": lambda folder: (folder / "step-0000009\N{ARABIC-INDIC DIGIT NINE}.pt").write_text("x"),
}


@pytest.mark.parametrize("parallelism", ["ddp", *weekly("fsdp")])
@pytest.mark.parametrize("odd", ODD)
def test_what_is_named_like_a_checkpoint_ends_no_run(bake: Bake, parallelism: str, odd: str) -> None:
    project = bake(parallelism=parallelism)
    train_alone(project, "--train.max_steps", "4")
    ODD[odd](project / "run" / "checkpoints")
    err = train_alone(project)
    assert err.count("\n") == (odd == "file") == err.count("is now step-00000099"), err
    assert len(read_losses(project / "run")) == STEPS


def test_a_best_that_is_no_file_of_the_run_shows_nothing(bake: Bake) -> None:
    project = bake()
    train_alone(project)
    best = project / "run" / "checkpoints" / "best"
    for odd in (lambda: best.symlink_to("/etc/passwd"), lambda: os.mkfifo(best)):
        best.unlink()
        odd()
        err = run_alone(project, "evaluate", "--checkpoint", "run", code=2).stderr
        assert err == "error: --checkpoint is run, neither a checkpoint nor a run.dir with a best one\n"


def test_the_best_checkpoint_stays_if_its_record_is_lost(bake: Bake) -> None:
    project = bake()
    words = ["--train.eval_every", "1", "--checkpoint.keep", "1", "--train.max_steps"]
    train_alone(project, *words, "3", "--optim.warmup_steps", "0")
    best = (project / "run" / "checkpoints" / "best").read_text()
    (project / "run" / "metrics.jsonl").unlink()
    train_alone(project, *words, "8", "--optim.lr", "1e-9")
    assert (project / "run" / "checkpoints" / best).exists()


def test_the_best_checkpoint_of_a_run_can_be_read_while_it_trains(bake: Bake) -> None:
    project = bake()
    words = ["--train.eval_every", "1", "--checkpoint.keep", "1", "--train.epochs", "500", "--train.max_steps", "20000"]
    with started(project / "scripts/launch.sh", *SMALL, *words, "--run.dir", "run", cwd=project, NPROC="1"):
        wait_until(lambda: len(read_records(project / "run", "eval")) > 1, "the run evaluates")
        for number in range(3):
            run_alone(project, "export", "--checkpoint", "run", "--output", f"{number}.safetensors")
            run_alone(project, "evaluate", "--checkpoint", "run", "--distributed.device", "cpu")


@pytest.mark.parametrize("parallelism", ["ddp", *weekly("fsdp")])
def test_a_resumed_run_keeps_no_checkpoint_mapped(bake: Bake, parallelism: str) -> None:
    """Otherwise, the space of a checkpoint that is removed would not be free."""
    project = bake(parallelism=parallelism)
    train(project, "--train.max_steps", "4")
    begins = ("train.py", "        self.evaluate_if_missing()\n")
    edit(project, before(begins, "print(sum('.pt' in line for line in open('/proc/self/maps')), 'mapped', flush=True)"))
    out = launch(project, *SMALL, "--run.dir", "run").stdout
    assert re.findall(r"\d+ mapped", out) == ["0 mapped"] * 2, out
