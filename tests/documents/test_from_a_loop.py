"""docs/from-a-loop.md: its diffs apply one after the other, and each loop prints what the page shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import BIN, TEMPLATE, Bake, launch, run, run_python

TEXT = (TEMPLATE / "docs" / "from-a-loop.md").read_text()
LOOP, PREDICT = TEXT.split("## Predict with the trained model")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", LOOP, re.MULTILINE | re.DOTALL)
LINES = r"(?:rank \d+, )?epoch \d: last batch \[[^]]*\], loss \d\.\d+|(?:rank \d+: )?\d+ of \d+ are right"


def assert_same(printed: str, shown: str) -> None:
    """Assert that a program prints the lines of a block, in any order of ranks, and losses to 0.01."""
    lines = [sorted(re.findall(LINES, text)) for text in (printed, shown)]
    losses = [[float(loss) for loss in re.findall(r"loss (\S+)", "\n".join(each))] for each in lines]
    assert losses[0] == pytest.approx(losses[1], abs=0.01)
    assert [re.sub("loss .*", "", line) for line in lines[0]] == [re.sub("loss .*", "", line) for line in lines[1]]


@pytest.mark.weekly
def test_each_loop_prints_what_the_page_shows(bake: Bake) -> None:
    project, printed = bake(), ""
    (project / ".venv").symlink_to(BIN.parent)
    for kind, text in BLOCKS:
        if kind == "python":
            (project / "loop.py").write_text(text)
            assert len(text.splitlines()) <= 30
        elif kind == "diff":
            (project / "edit.diff").write_text(text)
            run("patch", "--fuzz=0", "loop.py", "edit.diff", cwd=project)
        elif kind == "bash":
            printed = run("bash", "-ec", text, cwd=project).stdout
        elif "are right" in text:
            assert_same(printed, text)
        else:
            assert printed == text


def test_what_the_page_names_exists(bake: Bake) -> None:
    project = bake()
    code = {path.name: path.read_text() for path in Path(project / "src" / "my_experiment").glob("*.py")}
    rows = re.findall(r"^\| .*? \| `(\w+\.py)`: (.*?) \|", TEXT, re.MULTILINE)
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
