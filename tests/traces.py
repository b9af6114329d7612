"""Words that belong to one answer: a project with another answer must not contain them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rendering import File, Project

Table = dict[tuple[str, object], str]

# In all files. The table of answers in pyproject.toml is not searched. No pattern has groups of alternatives, because
# tests/test_render.py looks for each alternative where it belongs.
EVERYWHERE: Table = {
    ("parallelism", "ddp"): r"\bddp\b(?!-template)|DistributedDataParallel|SyncBatchNorm|no_sync",
    ("parallelism", "fsdp"): r"fsdp|fully.shard",
    ("parallelism", "model_parallel"): r"model.parallel",
    ("parallelism", "pipeline"): r"pipelin|bubble",
    ("parallelism", "tensor"): r"tensor.parallel|tensor_plan|sequence.parallel|check_shards|colwise|rowwise",
    ("parallelism", "data_parallel"): r"nn\.DataParallel",
    ("task", "digits"): r"\bUCI\b|digits\.npz|digits\.md|accuracy|pixel|GroupNorm|optical",
    ("task", "language"): r"bits.per.byte|\bgenerate\b|standard library|perplexity|model\.context|\bGPT\b|\bprompt\b",
    ("task", "control"): r"gymnasium|CartPole|\bcontrol\.|mean_return|pygame|advantages?\b",
    ("tracker", "tensorboard"): r"tensorboard|SummaryWriter|event file",
    ("tracker", "wandb"): r"wandb|Weights & Biases",
    ("tracker", "mlflow"): r"mlflow",
    # "spawn" is also the start method of loader processes, with a SpawnContext and a SpawnProcess.
    ("launcher", "spawn"): r"\bspawn(?![\"CP])",
    ("launcher", "torchrun"): r"torchrun|torch\.distributed\.elastic|standalone|MAX_RESTARTS",
    ("cluster", "slurm"): r"sbatch|scancel|scontrol",
    ("cluster", "kubernetes"): r"kubernetes|kubectl|kubeflow|\bpods?\b",
    ("docker", True): r"docker|in a container|development container",
    ("license", "MIT"): r"\bMIT\b|Permission is hereby granted",
    ("license", "Apache-2.0"): r"\bApache\b",
    ("license", "BSD-3-Clause"): r"\bBSD\b|Redistributions? ",
    ("license", "Proprietary"): r"proprietary|confidential",
}
# In prose: what a README, a setting or a script says. The code is the same under all strategies and for all tasks.
IN_PROSE: Table = {
    ("parallelism", "ddp"): r"bucket_cap_mb|sync_batch_norm|unused_parameters",
    ("parallelism", "fsdp"): r"reshard|all-gather|reduce-scatter|hybrid sharding",
    ("parallelism", "pipeline"): r"\bstages?\b(?! files)|GPipe|1F1B",
    ("parallelism", "tensor"): r"DTensor",
    ("task", "digits"): r"batch.?norm|step-00000440|\b360\b|\bdigits\b",
    ("task", "language"): r"step-00001855|byte-level|one_gpu\b|eight_gpus",
    ("task", "control"): r"step-00004000|\bepisodes?\b|reinforcement",
}
# What an answer rules out: it is in no prose of a project with that answer.
RULED_OUT: Table = {
    ("parallelism", "data_parallel"): r"two ranks|NPROC=[2-9]|[2-9] rank\(s\)|ranks? [01] and|\brank 1\b"
    r"|other ranks|1, 2 or 4|multinode|NODE_RANK|mpirun|srun (?!--)|starts the ranks|restarts all ranks|any rank, makes"
    r"|compiled",
    ("license", "none"): r"license ?[:=]|license-files|!LICENSE|toml LICENSE",
}
# model_parallel averages gradients with DDP, data_parallel explains why DDP is better, and FSDP can shard replicas.
ALLOWED = {("model_parallel", "ddp"), ("data_parallel", "ddp"), ("data_parallel", "model_parallel")}
ALLOWED |= {("pipeline", "fsdp"), ("tensor", "fsdp")}


def find_traces(file: File, owners: list[Project]) -> Iterator[str]:
    """Yield the words of other answers than those of the projects that have this file, and those they rule out."""
    for table in (EVERYWHERE, IN_PROSE, RULED_OUT):
        for (question, value), trace in table.items():
            chosen = {project.answers[question] for project in owners}
            others = any(answer != value and (answer, value) not in ALLOWED for answer in chosen)
            if is_searched(file.path, table, question) and (value in chosen if table is RULED_OUT else others):
                yield from (f"{file.path} of {question} {sorted(chosen)}: {word}" for word in words(trace, file.text))


def words(pattern: str, text: str) -> set[str]:
    """Return what a pattern matches, in any case."""
    return {found[0] for found in re.finditer(pattern, text, re.IGNORECASE)}


def is_searched(path: str, table: Table, question: str) -> bool:
    """Return whether a file is searched for a table's words about a question."""
    if question == "task" and path.startswith("docs/"):
        return False  # Recipes are about other data.
    if path == "docs/coming_from.md" and table is not RULED_OUT:
        return False  # It is about other tools, and about what strategies and launchers are called there.
    if question == "parallelism" and path.endswith("plan/layout.py"):
        return False  # It names another strategy, to change to if no settings of this one fit.
    if question == "launcher" and path.endswith("environment.py"):
        return False  # This file reads the variables of every launcher.
    return table is EVERYWHERE or is_prose(path)


def is_prose(path: str) -> bool:
    """Return whether a file is about this project, for people: no code, no recipe."""
    return not path.endswith((".py", "LICENSE")) and not path.startswith("docs/")
