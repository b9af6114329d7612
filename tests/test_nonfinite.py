"""Numbers that are not finite never reach the weights, under any strategy, and a run says where they come from."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NoReturn

import pytest
from conftest import STRATEGIES, Bake
from runs import SHORT, checkpoints, edit, launch, records, weights, world_size

pytestmark = pytest.mark.slow

# In the second epoch, which begins with step 23, two samples are not finite.
SAMPLES = """\
        image, label = self.dataset[index]
        if epoch == 1 and index in (12, 77):
            image = image * float("nan")
        return image, label
"""
# In step 6, the last layer divides by 0; the forward of evaluation and of a repeated step does, too.
LAYER = """\
        logits = self.linear(features.mean(dim=(2, 3)))
        self.calls = getattr(self, "calls", 0) + 1
        return logits / (self.calls < 6)
"""
RUN = (*SHORT, "--train.log_every", "10", "--train.max_steps", "50", "--train.eval_every", "null")


def strict(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file as a reader that knows no NaN reads them."""

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("parallelism", STRATEGIES)
def test_samples_that_are_not_finite_stop_a_run_or_are_skipped(bake: Bake, tmp_path: Path, parallelism: str) -> None:
    project, nproc = bake(parallelism=parallelism, launcher="spawn"), world_size(parallelism)
    edit(project, "splitting/seeding.py", "        return self.dataset[index]\n", SAMPLES)
    words = ("train", *RUN, "--checkpoint.every_steps", "10", "--checkpoint.keep", "9", "--run.dir", tmp_path / "run")
    done = launch(project, *words, nproc=nproc, expect=2)
    (error,) = re.findall(r"^error: .*$", done.stderr, re.MULTILINE)
    found = re.match(r"error: step (\d+): the (loss|gradient) is not finite on rank .*, first in the inputs of", error)
    assert found is not None and {"12", "77"} & set(re.findall(r"\d+", error.partition("samples")[2])), error
    bad = int(found[1])
    saved = checkpoints(tmp_path / "run")
    assert [int(re.sub(r"\D", "", name)) for name in saved] == list(range(10, bad, 10))
    assert strict(tmp_path / "run/metrics.jsonl")

    # The same command goes on before the bad step; it comes again, and is left out.
    launch(project, *words, "--train.on_nonfinite", "skip", nproc=nproc)
    last = records(tmp_path / "run", "train")[-1]
    assert last["step"] == 50 and last["skipped_steps"] in (1, 2)
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "run").values())
    assert all(record["loss"] is not None for record in strict(tmp_path / "run/metrics.jsonl"))


@pytest.mark.parametrize("parallelism", STRATEGIES)
def test_a_module_that_is_not_finite_is_named(bake: Bake, tmp_path: Path, parallelism: str) -> None:
    project, nproc = bake(parallelism=parallelism, launcher="spawn"), world_size(parallelism)
    edit(project, "model.py", "        return self.linear(features.mean(dim=(2, 3)))\n", LAYER)
    words = ("--train.microbatches", str(nproc), "--run.dir", tmp_path / "run")
    done = launch(project, "train", *RUN, *words, nproc=nproc, expect=2)
    assert re.search(
        r"^error: step \d+: the loss is not finite on rank .*, first in the output of head", done.stderr, re.M
    )
    assert not list(tmp_path.glob("run/checkpoints/*"))


def test_a_run_that_skips_every_step_ends(bake: Bake, tmp_path: Path) -> None:
    """Saves look at the same steps as the log lines before them."""
    project = bake()
    edit(project, "model.py", "        return self.linear(features.mean(dim=(2, 3)))\n", LAYER)
    words = ("--train.max_steps", "1000", "--train.on_nonfinite", "skip", "--run.dir", tmp_path / "run")
    words += ("--checkpoint.every_steps", "20")
    done = launch(project, "train", *RUN, *words, expect=2)
    assert re.search(r"^error: step \d+: the loss .*, as in the 1\d\d steps before, .*all skipped", done.stderr, re.M)
    assert records(tmp_path / "run", "train")[-1]["step"] < 130


def test_test_samples_that_are_not_finite_are_named(bake: Bake, tmp_path: Path) -> None:
    project = bake()
    edit(
        project,
        "dataset.py",
        "        self.max_shift = max_shift\n",
        """\
        self.max_shift = max_shift
        if split == "test":
            self.images[[7, 100]] = float("nan")
""",
    )
    done = launch(project, "train", *SHORT, "--run.dir", tmp_path / "run")
    assert done.stderr.count("warning: loss of test sample 7, 100 is not finite\n") == 1, done.stderr


def test_an_overflow_that_the_scaler_expects_is_none(bake: Bake, tmp_path: Path) -> None:
    """fp16 starts with a factor of 65,536, with which the first gradients of a large loss overflow."""
    project = bake()
    edit(project, "dataset.py", "    return F.cross_entropy(", "    return 100 * F.cross_entropy(")
    launch(project, "train", *RUN, "--train.precision", "fp16", "--run.dir", tmp_path / "run")
    assert records(tmp_path / "run", "train")[-1]["step"] == 50
