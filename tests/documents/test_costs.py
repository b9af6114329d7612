"""The figures of docs/costs.md are those of docs/costs.py and of `estimate`; seconds are not tested."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from conftest import BIN, TEMPLATE, Bake, run

TEXT = (TEMPLATE / "docs" / "costs.md").read_text()
MEMORY = re.findall(r"^\| (\w+), (\d) ranks? \| (.*) \|$", TEXT, re.MULTILINE)


@pytest.mark.weekly
def test_bytes_are_those_of_the_formulas_and_stale_gradients_diverge(tmp_path: Path) -> None:
    script, picture = TEMPLATE / "docs" / "costs.py", tmp_path / "costs.svg"
    assert len(script.read_text().splitlines()) <= 80
    out = run(BIN / "torchrun", "--standalone", "--nproc-per-node", "8", script, picture, cwd=tmp_path).stdout
    rows = [ast.literal_eval(line) for line in out.splitlines()]
    values = {row[:3]: row[3] for row in rows}
    shown = re.findall(r"^\| N = (\d) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", TEXT, re.MULTILINE)
    assert len(shown) == 3 and "<svg" in picture.read_text()
    for size, *numbers in ([int(number) for number in row] for row in shown):
        total = 2 * (size - 1) * 16 * 2**20
        assert numbers == [values["server", 16, size], total, values["ring", 16, size], total // size]
    assert values["waits: False", 0.1, 4] < values["waits: True", 0.1, 4] < 0.01
    assert values["waits: True", 1.2, 4] < 0.01 and values["waits: False", 1.2, 4] > 1e3


@pytest.mark.weekly
@pytest.mark.parametrize(("parallelism", "ranks", "numbers"), MEMORY)
def test_memory_is_what_estimate_prints(bake: Bake, parallelism: str, ranks: str, numbers: str) -> None:
    project = bake(parallelism=parallelism, task="language")
    command = re.findall(r"^python (-m my_experiment estimate .*)$", TEXT, re.MULTILINE)[0].replace("4", ranks, 1)
    printed = run(BIN / "python", *command.split(), cwd=project, PYTHONPATH=str(project / "src")).stdout
    assert "   ".join(numbers.split(" | ")) in re.sub(" {3,}", "   ", printed)
