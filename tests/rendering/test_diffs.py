"""The diffs in docs/diffs are what `make diffs` makes, and turn a default project into one that resumes its runs."""

from __future__ import annotations

import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from conftest import TEMPLATE, Bake, launch, read_losses, read_tree, run
from renders import Recorder, write

STRATEGIES = ("fsdp", "pipeline", "tensor")
SMALL = ["--distributed.device", "cpu", "--train.log_every", "1"]


def diff(strategy: str) -> str:
    """Return the diff that turns the default project into one with another strategy, for ``patch -p1``."""
    recorder = Recorder()
    with TemporaryDirectory() as folder:
        for side, parallelism in (("a", "ddp"), ("b", strategy)):
            write(recorder.render({"parallelism": parallelism}), Path(folder, side))
        words = ("git", "diff", "--no-index", "--no-color", "--no-prefix", "a", "b")
        return subprocess.run(words, cwd=folder, capture_output=True, text=True).stdout


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_diff_is_the_one_between_two_renders(bake: Bake, strategy: str) -> None:
    file = TEMPLATE / "docs" / "diffs" / f"{strategy}.diff"
    assert file.read_text() == diff(strategy), "run make diffs"
    project = bake()
    run("bash", "-c", f"patch -p1 --fuzz=0 < {file}", cwd=project)
    assert read_tree(project) == read_tree(bake("other", parallelism=strategy))


@pytest.mark.weekly
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_resumes_after_the_diff_is_applied(bake: Bake, strategy: str) -> None:
    project = bake()
    launch(project, "train", *SMALL, "--train.max_steps", "20")
    run("bash", "-c", f"patch -p1 < {TEMPLATE}/docs/diffs/{strategy}.diff", cwd=project)
    resumed = launch(project, "train", *SMALL, "--train.max_steps", "30", "--train.microbatches", "2")
    assert "step 20 of 30" in resumed.stdout
    whole = bake("whole")
    launch(whole, "train", *SMALL, "--train.max_steps", "30")
    ours, theirs = (read_losses(each / "runs" / "default") for each in (project, whole))
    assert ours == pytest.approx(theirs, rel=1e-5)


if __name__ == "__main__":
    for strategy in STRATEGIES:
        (TEMPLATE / "docs" / "diffs" / f"{strategy}.diff").write_text(diff(strategy))
