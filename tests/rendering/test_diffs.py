"""The diffs in docs/diffs are what `make diffs` makes, and turn a default project into one that resumes its runs."""

from __future__ import annotations

import pytest
from conftest import TEMPLATE, Bake, launch, read_losses, read_tree, run
from diffs import STRATEGIES, diff

SMALL = ["--distributed.device", "cpu", "--train.log_every", "1"]


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
