"""`plan` says what a step takes: compared with measured runs, for every strategy, two tasks, and 1, 2 and 4 ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import CHOICES, Bake, leave_to_weekly, run
from runs import alone, launch, world_size

MEASURED = Path(__file__).with_name("measured.py")
# A model whose tensors are large beside what kernels and messages take for themselves.
SETTINGS = {
    "language": "--model.width 64 --model.layers 6 --model.heads 4 --model.context 64 --train.microbatches 4",
    "digits": "--model.width 32 --model.depth 3 --train.microbatches 4",
}
CASES = leave_to_weekly(
    [(name, task) for name in CHOICES["parallelism"] for task in ("language", "digits")],
    [(name, "digits") for name in CHOICES["parallelism"] if name != "ddp"],
)


# Four ranks, of which the last two have fewer rows of some tensors.
UNEVEN = "--model.width 66 --model.heads 6 --parallel.replicas 2 --parallel.shard_replicas true"


def compare(project: Path, folder: Path, task: str, sizes: list[int], words: str) -> None:
    """Compare what `plan` says of ranks with what they take: messages exactly, the peak of memory within 10 %."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={sizes[-1]}"]
    arguments = ["my_experiment", task, folder, ",".join(map(str, sizes)), *words.split()]
    run(*launcher, MEASURED, *arguments, cwd=project, PYTHONPATH="src", CUDA_VISIBLE_DEVICES="")
    said: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    for rank in range(sizes[-1]):
        for size, measured in json.loads((folder / f"measured{rank}.json").read_text()).items():
            ours = said[size][str(rank)]
            print(f"{words} {size} {rank}: {ours['peak'] / measured['peak'] - 1:+.1%} {ours['messages']}")
            assert ours["messages"] == measured["messages"], (size, rank)
            assert ours["peak"] == pytest.approx(measured["peak"], rel=0.1), (size, rank)
            assert bool(ours["messages"]) == (size != "1")


@pytest.mark.slow
@pytest.mark.parametrize(("parallelism", "task"), CASES)
def test_plan_says_what_real_ranks_take(bake: Bake, tmp_path: Path, parallelism: str, task: str) -> None:
    sizes = [size for size in (1, 2, 4) if size <= world_size(parallelism, 4)]
    compare(bake(parallelism=parallelism, task=task), tmp_path, task, sizes, SETTINGS[task])


@pytest.mark.slow
@pytest.mark.weekly
def test_plan_says_what_ranks_with_unequal_shards_take(bake: Bake, tmp_path: Path) -> None:
    project = bake(parallelism="tensor", task="language")
    compare(project, tmp_path, "language", [4], f"{SETTINGS['language']} {UNEVEN}")


@pytest.mark.slow
def test_ranks_with_unequal_shards_are_simulated_each(baked: Bake) -> None:
    _, record = plan(baked(parallelism="tensor", task="language"), "--ranks", "4", *UNEVEN.split())
    assert [each["ranks"] for each in record["ranks"]] == ["0-1", "2-3"]
    assert record["ranks"][0]["memory_bytes"]["optimizer"] > record["ranks"][1]["memory_bytes"]["optimizer"]


def plan(project: Path, *words: str, expect: int = 0) -> tuple[str, dict[str, Any]]:
    """Run `plan` with the shipped launcher, and return what it prints: the table, and the record."""
    *lines, record = launch(project, "plan", *words, expect=expect).stdout.splitlines()
    return "\n".join(lines), json.loads(record)


@pytest.mark.slow
def test_what_does_not_fit_fails_and_gets_settings_that_do(baked: Bake) -> None:
    """With NPROC=2: one process answers, for more ranks than there are, and none of them trains."""
    project = baked(parallelism="fsdp")
    words = "--ranks 16 --nodes 2 --parallel.replicas 2 --data.global_batch_size 128 --model.depth 1".split()
    said, record = plan(project, *words)
    needed = record["ranks"][0]["device_bytes"]
    assert record["fits"] is None and "--device-memory says whether it fits" in said
    said, record = plan(project, *words, "--device-memory", f"{needed // 1024 - 1}KiB", expect=1)
    assert record["fits"] is False and "this fits, in " in said
    changes = record["fitting_settings"].split()
    _, record = plan(project, *words, *changes, "--device-memory", f"{needed // 1024 - 1}KiB")
    assert record["fits"] is True
    said, record = plan(project, *words, "--device-memory", "100kB", expect=1)
    assert record["fitting_settings"] is None and """--variables-to-update '{"parallelism": "tensor"}'""" in said


@pytest.mark.slow
def test_operations_are_those_of_a_transformer(baked: Bake) -> None:
    """A product of (n, k) and (k, m) takes 2nkm: one in forward, two in backward; attention has two, and five."""
    width, layers, time, batch, classes = 64, 2, 1024, 4, 256
    words = f"--model.width {width} --model.layers {layers} --model.heads 4 --model.context {time}".split()
    _, record = plan(baked(task="language"), "--ranks", "1", *words, "--data.global_batch_size", str(batch))
    products = 3 * 2 * batch * time * (layers * 12 * width**2 + width * classes)
    attention = 7 * 2 * batch * time**2 * width * layers
    assert record["ranks"][0]["flops"] == products + attention


@pytest.mark.slow
def test_a_message_of_an_unknown_kind_is_refused(plain: Path) -> None:
    code = "import torch; from my_experiment.plan.messages import read_message; "
    code += "read_message(torch.ops.c10d.{}.default, ())"
    run(sys.executable, "-c", code.format("barrier"), cwd=plain, PYTHONPATH="src")
    error = run(sys.executable, "-c", code.format("gather_"), cwd=plain, PYTHONPATH="src", expect=1).stderr
    assert "UserError: plan does not know what the operation gather_ sends" in error


@pytest.mark.slow
def test_links_and_times(baked: Bake) -> None:
    """Two pipelines on two nodes: each stage is simulated once, and its neighbors are on the same node or not."""
    words = "--ranks 8 --nodes 2 --parallel.replicas 2".split()
    said, record = plan(baked(parallelism="pipeline"), *words)
    assert [each["ranks"] for each in record["ranks"]] == ["0-1", "2-3", "4-5", "6-7"]
    assert "no time of a step without --device-speed, --link-bandwidth, --node-bandwidth" in said
    sent = [{(each["collective"], each["link"]) for each in role["messages"]} for role in record["ranks"]]
    crossing = ("send", "between nodes")
    assert [crossing in links for links in sent] == [False, True, True, False]
    speeds = "--device-speed 1GFLOP/s --link-bandwidth 1GB/s --node-bandwidth 100MB/s".split()
    _, record = plan(baked(parallelism="pipeline"), *words, *speeds)
    first = record["ranks"][0]
    assert record["waiting_share"] == pytest.approx(3 / 11, abs=1e-4)
    assert first["seconds"]["computing"] == pytest.approx(first["flops"] / 1e9 / (8 / 11))
    expected = sum(
        each["sent_bytes"] / {"within a node": 1e9, "between nodes": 1e8}[each["link"]] for each in first["messages"]
    )
    assert first["seconds"]["sending"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", ["1", "2"])
def test_activations_of_tensor_parallelism_are_not_sent_while_ranks_compute(baked: Bake, replicas: str) -> None:
    """The gradients of two replicas may be."""
    speeds = "--device-speed 1GFLOP/s --link-bandwidth 1GB/s --parallel.replicas".split()
    _, record = plan(baked(parallelism="tensor", task="language"), "--ranks", "4", *speeds, replicas)
    seconds = record["ranks"][0]["seconds"]
    one_by_one = seconds["computing"] + seconds["sending"]
    assert seconds["most"] == pytest.approx(one_by_one)
    if replicas == "1":
        assert seconds["least"] == pytest.approx(one_by_one)
    else:
        assert max(seconds["computing"], seconds["sending"]) < seconds["least"] < 0.999 * one_by_one


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("", "plan needs --ranks N"),
        ("--ranks 0", "--ranks is '0'"),
        ("--ranks 6 --nodes 4", "--ranks 6 does not divide into --nodes 4"),
        ("--ranks 7", "does not divide into 7 share(s)"),
        ("--ranks 2 --device-memory 80", "--device-memory is '80'; give an amount in B"),
        ("--ranks 2 --device-memory 80GB/s", "--device-memory is '80GB/s'"),
        ("--ranks 2 --device-speed fast", "--device-speed is 'fast'"),
        ("--ranks 2 --link-bandwidth 0GB/s", "--link-bandwidth is '0GB/s'"),
    ],
)
def test_a_question_that_is_none_is_rejected(baked: Bake, words: str, named: str) -> None:
    result = alone(baked(), "plan", *words.split(), expect=2)
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and named in result.stderr
    assert not result.stdout


@pytest.mark.slow
def test_other_commands_take_no_ranks(baked: Bake) -> None:
    assert "--ranks" in alone(baked(), "train", "--ranks", "2", expect=2).stderr
