"""Words that belong to one choice: a project with another choice must not contain them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath

from renders import File, Project

# No pattern has groups of alternatives, because test_render.py looks for each alternative where it belongs.
TRACES: dict[tuple[str, object], str] = {
    ("parallelism", "ddp"): r"\bddp\b(?!-template)|DistributedDataParallel|GradBucket",
    ("parallelism", "fsdp"): r"fsdp|fully.shard|reshard",
    ("parallelism", "model_parallel"): r"model.parallel",
    ("parallelism", "pipeline"): r"pipelin|1F1B|GPipe|(?<!stager\.)\bstages?\b",
    ("parallelism", "tensor"): r"tensor.parallel|tensor_plan|rowwise|plan\.py",
    ("parallelism", "data_parallel"): r"nn\.DataParallel",
    ("parallelism", "mesh"): r"mesh of ranks|\"pipeline\", \"replicate\", \"shard\", \"tensor\"",
    ("task", "digits"): r"\bUCI\b|\bdigits\b|accuracy|pixel|GroupNorm",
    ("task", "language"): r"bits.per.byte|\bgenerate\b|standard library|perplexity|\bGPT\b",
    ("task", "control"): r"gymnasium|CartPole|gae_lambda|advantages?\b|\bepisodes?\b",
    ("tracker", "tensorboard"): r"tensorboard(?!_trace_handler)|SummaryWriter",
    ("tracker", "wandb"): r"wandb|Weights & Biases",
    ("tracker", "mlflow"): r"mlflow",
    ("launcher", "spawn"): r"\bspawn\b(?!\")",  # Also how loader processes start, but as a string.
    ("launcher", "torchrun"): r"torchrun|distributed\.elastic|MAX_RESTARTS",
    ("cluster", "slurm"): r"sbatch|slurm",
    ("cluster", "kubernetes"): r"kubernetes|kubectl|\bpods?\b",
    ("docker", True): r"docker",
    ("license", "MIT"): r"\bMIT\b|Permission is hereby granted",
    ("license", "Apache-2.0"): r"\bApache\b",
    ("license", "BSD-3-Clause"): r"\bBSD\b|Redistributions? ",
    ("license", "Proprietary"): r"proprietary|confidential",
}
# Pairs (choice, other) where a project may name the other one, because it builds on it or explains the difference.
ALLOWED = {("model_parallel", "ddp"), ("data_parallel", "ddp"), ("pipeline", "fsdp"), ("tensor", "fsdp")}
ALLOWED |= {("mesh", part) for part in ("fsdp", "pipeline", "tensor")}
# Files that are the same under all choices of a question, and serve each of them.
COMMON = {
    (".gitignore", "cluster"),
    ("distributed.py", "launcher"),  # Reads the variables of every launcher,
    ("distributed.py", "parallelism"),  # and counts the devices of a rank.
    ("doctor.py", "cluster"),
    ("files.py", "parallelism"),  # Reads weights that other programs saved.
    ("rehearse.py", "parallelism"),  # Numbers the ranks of every strategy that shards.
}


def find_traces(file: File, owners: list[Project]) -> Iterator[str]:
    """Yield the words of other choices than those of the projects that have this file."""
    text = re.sub(".*cruft update.*", "", file.text)  # It names another choice on purpose.
    for (question, value), pattern in TRACES.items():
        chosen = {project.answers[question] for project in owners}
        others = any(choice != value and (choice, value) not in ALLOWED for choice in chosen)
        if others and (PurePath(file.path).name, question) not in COMMON:
            yield from (
                f"{file.path} of {question} {sorted(chosen)}: {word}, a word of templates/{question}/{value}"
                for word in words(pattern, text)
            )


def words(pattern: str, text: str) -> set[str]:
    """Return what a pattern matches, in any case."""
    return {found[0] for found in re.finditer(pattern, text, re.IGNORECASE)}
