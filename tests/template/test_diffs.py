"""The diffs in docs/diffs are what `make diffs` makes, and turn a project into one that resumes its runs."""

from __future__ import annotations

import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from conftest import TEMPLATE, Bake, launch, read_losses, read_tree, run
from renders import Recorder, write

# The strategies before and after each.
DIFFS = {strategy: ("ddp", strategy) for strategy in ("fsdp", "pipeline", "tensor")}
DIFFS |= {f"mesh-from-{strategy}": (strategy, "mesh") for strategy in ("fsdp", "pipeline", "tensor")}
SMALL = ["--distributed.device", "cpu", "--train.log_every", "1"]


def diff(name: str) -> str:
    """Return the diff that turns a default project into one with another strategy, for ``patch -p1``."""
    recorder = Recorder()
    with TemporaryDirectory() as folder:
        for side, parallelism in zip("ab", DIFFS[name], strict=True):
            write(recorder.render({"parallelism": parallelism}), Path(folder, side))
        words = ("git", "diff", "--no-index", "--no-color", "--no-prefix", "a", "b")
        return subprocess.run(words, cwd=folder, capture_output=True, text=True).stdout


@pytest.mark.parametrize("name", DIFFS)
def test_a_diff_is_the_one_between_two_renders(bake: Bake, name: str) -> None:
    file, (before, after) = TEMPLATE / "docs" / "diffs" / f"{name}.diff", DIFFS[name]
    assert file.read_text() == diff(name), "run make diffs"
    project = bake(parallelism=before)
    run("bash", "-c", f"patch -p1 --fuzz=0 < {file}", cwd=project)
    assert read_tree(project) == read_tree(bake("other", parallelism=after))


@pytest.mark.weekly
@pytest.mark.parametrize("name", DIFFS)
def test_a_run_resumes_after_the_diff_is_applied(bake: Bake, name: str) -> None:
    project = bake(parallelism=DIFFS[name][0])
    launch(project, "train", *SMALL, "--train.max_steps", "20")
    run("bash", "-c", f"patch -p1 < {TEMPLATE}/docs/diffs/{name}.diff", cwd=project)
    resumed = launch(project, "train", *SMALL, "--train.max_steps", "30", "--data.micro_batch_size", "2")
    assert "step 20 of 30" in resumed.stdout
    whole = bake("whole")
    launch(whole, "train", *SMALL, "--train.max_steps", "30")
    ours, theirs = (read_losses(each / "runs" / "default") for each in (project, whole))
    assert ours == pytest.approx(theirs, rel=1e-5)


if __name__ == "__main__":
    for name in DIFFS:
        (TEMPLATE / "docs" / "diffs" / f"{name}.diff").write_text(diff(name))
