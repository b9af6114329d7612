"""Pages of docs/: their names of the template and of NCCL exist; costs are those of costs.py and `estimate`."""

from __future__ import annotations

import ast
import re
import zipfile
from pathlib import Path

import pytest
from conftest import BIN, CHOICES, TEMPLATE, Bake, launch, run

ROWS = re.findall(r"^\| .* \| (.*) \|$", (TEMPLATE / "docs" / "coming-from.md").read_text(), re.MULTILINE)
# Programs and names of PyTorch, and the beginnings of commands.
OTHERS = {"cruft update", "state_dict", "gather_object", "--config FILE", "checkpoints/step-*.pt"}
NAMES = sorted({name for row in ROWS for name in re.findall(r"`([^`]+)`", row)} - OTHERS)
COSTS = (TEMPLATE / "docs" / "costs.md").read_text()
MEMORY = re.findall(r"^\| (\w+), (\d) ranks? \| (.*) \|$", COSTS, re.MULTILINE)


@pytest.fixture(scope="module")
def texts(baked: Bake) -> dict[str, str]:
    """The texts of a project, by path."""
    project = baked(task="language")
    paths = [path for path in project.rglob("*") if path.is_file()]
    return {str(path.relative_to(project)): path.read_text() for path in paths}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_the_template_exists(texts: dict[str, str], name: str) -> None:
    code = "\n".join(text for path, text in texts.items() if path.startswith("src/"))
    if re.search(r"\.(py|sh|yaml)\b", name):
        assert any(path.endswith(name.split()[0]) for path in texts)
        assert all(f'"{word}"' in code for word in name.split()[1:])
    elif name.isupper():
        assert name in texts["scripts/launch.sh"]
    elif "=" in name:
        question, choice = name.split("=")
        assert choice in CHOICES[question]
    elif found := re.fullmatch(r"([A-Z]\w+)\.(\w+)", name):
        body = re.split(rf"^class {found[1]}\b", code, flags=re.MULTILINE)[1].split("\nclass ")[0]
        assert re.search(rf"^    (def )?{found[2]}\b", body, re.MULTILINE)
    elif found := re.fullmatch(r"(\w+)\.(\w+)", name):
        section = re.findall(rf"^    {found[1]}: (\w+) = field", code, re.MULTILINE)[0]
        body = code.split(f"class {section}:")[1].split("\nclass ")[0]
        assert re.search(rf"^    {found[2]}: ", body, re.MULTILINE)
    else:
        answers = {*CHOICES, *(choice for choices in CHOICES.values() for choice in choices)}
        assert name in answers or re.search(rf"^((class|def) {name}\b|{name} = )", code, re.MULTILINE)


@pytest.mark.weekly
def test_bytes_are_those_of_the_formulas_and_stale_gradients_diverge(tmp_path: Path) -> None:
    script, picture = TEMPLATE / "docs" / "costs.py", tmp_path / "costs.svg"
    assert len(script.read_text().splitlines()) <= 80
    out = run(BIN / "torchrun", "--standalone", "--nproc-per-node", "8", script, picture, cwd=tmp_path).stdout
    rows = [ast.literal_eval(line) for line in out.splitlines()]
    values = {row[:3]: row[3] for row in rows}
    shown = re.findall(r"^\| N = (\d) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", COSTS, re.MULTILINE)
    assert len(shown) == 3 and "<svg" in picture.read_text()
    for size, *numbers in ([int(number) for number in row] for row in shown):
        total = 2 * (size - 1) * 16 * 2**20
        assert numbers == [values["server", 16, size], total, values["ring", 16, size], 2 * total // size]
    assert values["waits: False", 0.1, 4] < values["waits: True", 0.1, 4] < 0.01
    assert values["waits: True", 1.2, 4] < 0.01 and values["waits: False", 1.2, 4] > 1e3


@pytest.mark.weekly
@pytest.mark.parametrize(("parallelism", "ranks", "numbers"), MEMORY)
def test_memory_is_what_estimate_prints(bake: Bake, parallelism: str, ranks: str, numbers: str) -> None:
    project = bake(parallelism=parallelism, task="language")
    command = re.findall(r"^scripts/launch.sh (estimate .*)$", COSTS, re.MULTILINE)[0].replace("4", ranks, 1)
    printed = launch(project, *command.split()).stdout
    assert "   ".join(numbers.split(" | ")) in re.sub(" {3,}", "   ", printed)


@pytest.mark.weekly
def test_variables_are_in_the_library_or_gone(tmp_path: Path) -> None:
    text = (TEMPLATE / "docs" / "nccl.md").read_text()
    package, version = re.findall(r"`(nvidia-nccl-\w+)` ([\d.]+)", text)[0]
    run(BIN / "pip", "download", "--quiet", "--no-deps", f"{package}=={version}", cwd=tmp_path)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        library = wheel.read(next(name for name in wheel.namelist() if "/libnccl.so" in name))
    rows = re.findall(r"^\| (`NCCL_.*?) \| (.*)", text, re.MULTILINE)
    old = set(re.findall(r"NCCL_[A-Z0-9_]+", " ".join(row[0] for row in rows[-5:]))) | {"NCCL_BUFFLE"}
    new = set(re.findall(r"(?<!TORCH_)NCCL_[A-Z0-9_]+", text)) - old
    for names, expected in ((new, True), (old, False)):
        for name in names:
            assert bool(re.search(rf"\b{name}\b".encode(), library)) == expected, name
    assert len(new) > 15 and len(old) > 6
