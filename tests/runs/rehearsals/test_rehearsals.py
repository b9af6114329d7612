"""A rehearsal on a CPU is what ranks do: it sends what they send, holds what they hold, and finds what would hang."""

from __future__ import annotations

import json
import re

import pytest
from conftest import BIN, TEMPLATE, Bake, blocks, edit, run, run_alone, weekly

pytestmark = [pytest.mark.long, pytest.mark.independent]

Changes = dict[tuple[str, str], str]
PAGE = TEMPLATE / "docs" / "rehearse.md"
RETURN = ("task.py", '        return {"loss": loss}\n')
LAYOUTS = {"tensor": "--parallel.replicas 2", "mesh": "--parallel.pipeline 2 --parallel.tensor 2"}
TWO_STEPS = "train --train.max_steps 2 --dataset.max_bytes 50000 --dataset.test_bytes 2000 --distributed.device cpu"
HEAD = ("model.py", "        return self.linear(self.norm(features))\n")
LAYER = ("model.py", "        self.linear = linear(width, vocabulary)\n")
LOSS = ("task.py", '        loss = F.cross_entropy(logits, targets.flatten(), reduction="sum")\n')
RANK = '__import__("torch").distributed.get_rank()'
TWO_GROUPS = """        groups = [dist.new_group([0, 1, 2, 3]), dist.new_group([0, 1, 2, 3])]
        if dist.get_rank() % 2:
            groups.reverse()
        for group in groups:
            dist.all_reduce(torch.zeros(1), group=group)
"""


def add(line: tuple[str, str], text: str) -> Changes:
    """Return an edit that adds something after a line."""
    return {line: line[1] + text}


@pytest.mark.parametrize("parallelism", ["mesh", *weekly("fsdp", "tensor", "pipeline")])
def test_a_rehearsed_rank_sends_and_holds_what_a_rank_does(bake: Bake, parallelism: str) -> None:
    project = bake(parallelism=parallelism, task="language")
    script = TEMPLATE / "tests/runs/rehearsals/record_ranks.py"
    words = f"{TWO_STEPS} {LAYOUTS.get(parallelism, '')}".split()
    environment = {"PYTHONPATH": "src", "PYTHONHASHSEED": "0"}
    run(
        *(BIN / "torchrun", "--standalone", "--nproc-per-node", "4", script, "real", "real", *words),
        cwd=project,
        **environment,
    )
    run(BIN / "python", script, "rehearsed", "4", *words, cwd=project, **environment)
    for rank in range(4):
        real, rehearsed = (json.loads((project / f"{name}-{rank}.json").read_text()) for name in ("real", "rehearsed"))
        assert len(real["messages"]) > 10 and real == rehearsed


ON_RANK_0 = add(LOSS, f"        if {RANK} == 0:\n            dist.all_reduce(torch.zeros(1))\n")
ON_OTHER_RANKS = add(LOSS, f"        if {RANK} > 0:\n            dist.all_reduce(torch.zeros(1))\n")
ON_A_STAGE = {HEAD: "        __import__('torch').distributed.all_reduce(features.new_zeros(3))\n" + HEAD[1]}
OTHER_SHAPE = add(LOSS, f"        dist.all_reduce(torch.zeros(1 + {RANK} // 3))\n")
NO_SEND = add(LOSS, f"        if {RANK}:\n            dist.recv(torch.zeros(1), 0)\n")
# Rank 3 has another size where FSDP gathers the weights of the block.
LARGER = add(LAYER, f"        self.extra = nn.Parameter(torch.ones({RANK} // 3 * 8 + 8))\n")
LARGER |= {HEAD: HEAD[1].rstrip() + " * self.extra[0]\n"}


@pytest.mark.parametrize(
    ("parallelism", "ranks", "changes", "named", "file"),
    [
        ("fsdp", 4, ON_RANK_0, "rank(s) [0] in allreduce torch.float32[1]", "task.py"),
        ("pipeline", 2, ON_A_STAGE, "rank(s) [1] in allreduce torch.float32[3] over world at model.py:", "model.py"),
        *weekly(
            ("fsdp", 4, ON_OTHER_RANKS, "rank(s) [1, 3] in allreduce torch.float32[1]", "task.py"),
            ("fsdp", 4, LARGER, "rank(s) [3] in", "parallel.py"),
            ("tensor", 4, OTHER_SHAPE, "rank(s) [3] in allreduce", "task.py"),
            ("mesh", 4, add(LOSS, TWO_GROUPS), "rank(s) [0, 1, 3] in allreduce torch.float32[1]", "task.py"),
            ("fsdp", 2, NO_SEND, "rank(s) [1] in recv", "task.py"),
        ),
    ],
    ids=["rank 0", "a stage", "other ranks", "a larger parameter", "another shape", "another order", "no send"],
)
def test_messages_that_do_not_match_are_named(
    bake: Bake, parallelism: str, ranks: int, changes: Changes, named: str, file: str
) -> None:
    project = bake(parallelism=parallelism, task="language")
    edit(project, changes)
    layout = LAYOUTS["tensor"].split() if parallelism == "tensor" else []
    error = run_alone(project, "rehearse", "--ranks", str(ranks), *layout, code=1).stderr
    assert error.count("\n") == 1 and error.startswith("error: messages do not match: "), error
    assert named in error and f"{file}:" in error


GATHERS = f"""        dist.gather(torch.zeros(2), [torch.zeros(2) for _ in range(4)] if {RANK} == 0 else None)
        to_next = dist.P2POp(dist.isend, torch.zeros(2), ({RANK} + 1) % 4)
        for work in dist.batch_isend_irecv([to_next, dist.P2POp(dist.irecv, torch.zeros(2), ({RANK} - 1) % 4)]):
            work.wait()
"""
BUILT = ("model.py", "    return nn.Sequential(blocks)\n")


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("parallelism", "changes"),
    [
        ("fsdp", add(LOSS, GATHERS)),
        ("pipeline", {BUILT: "    blocks['block1'].requires_grad_(False)\n" + BUILT[1]}),
    ],
    ids=["a root and a ring", "a stage that trains nothing"],
)
def test_ranks_that_differ_for_a_reason_match(
    bake: Bake, parallelism: str, changes: dict[tuple[str, str], str]
) -> None:
    project = bake(parallelism=parallelism, task="language")
    edit(project, changes)
    assert "messages match" in run_alone(project, "rehearse", "--ranks", "4", "--all").stdout


@pytest.mark.parametrize("parallelism", ["fsdp", *weekly("mesh", "pipeline", "tensor")])
def test_a_rehearsal_shrinks_with_the_number_of_ranks(bake: Bake, parallelism: str) -> None:
    project, weights = bake(parallelism=parallelism, task="language"), []
    sizes = LAYOUTS["mesh"].split() if parallelism == "mesh" else []
    for ranks, name in ((1, "estimate"), (2, "rehearse")):
        words = (name, "--ranks", str(4 * ranks if sizes else ranks), "--memory", "1", *sizes)
        out = run_alone(project, *words, "--flops", "1e-3", "--links", "{world: 1e-6, shard: 1e-6}").stdout
        assert "fit into 1; not counted" in out and "s at these rates\n" in out
        assert out.endswith("messages match, as far as they do not depend on values\n")
        rows = [line.split() for line in out.splitlines() if line.startswith("rank")]
        weights.append(min(float(row[2]) for row in rows))
    assert weights[1] < 0.75 * weights[0]
    assert not (project / "runs").exists()


@pytest.mark.weekly
def test_the_page_shows_what_is_printed(bake: Bake) -> None:
    """For 512 ranks, and for a fault; seconds differ."""
    (many, fault), (printed, error) = blocks(PAGE, "bash"), blocks(PAGE, "text")
    project = bake(parallelism="mesh", task="language")
    out = run("bash", "-c", many, cwd=project, PYTHONPATH="src").stdout
    assert re.sub(r"in \d+ s\n", "in 52 s\n", out).endswith(printed)
    project = bake("fault", parallelism="fsdp", task="language")
    edit(project, {RETURN: blocks(PAGE, "python")[0] + RETURN[1]})
    assert run("bash", "-c", fault, cwd=project, code=1, PYTHONPATH="src").stderr == error
