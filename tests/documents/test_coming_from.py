"""Whatever docs/coming-from.md names on the side of the template is in a project, under that name."""

from __future__ import annotations

import re

import pytest
from conftest import CHOICES, TEMPLATE, Bake

ROWS = re.findall(r"^\| .* \| (.*) \|$", (TEMPLATE / "docs" / "coming-from.md").read_text(), re.MULTILINE)
# Programs and names of PyTorch, and the beginnings of commands.
OTHERS = {"cruft update", "state_dict", "all_gather_object", "--config FILE", "checkpoints/step-*.pt"}
NAMES = sorted({name for row in ROWS for name in re.findall(r"`([^`]+)`", row)} - OTHERS)


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
