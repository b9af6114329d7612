"""Sizes of what is rendered stay below the caps of caps.json, which fall and never rise."""

from __future__ import annotations

import ast
import json

import pytest
from sizes import CAPS, measure_all, private_names

COLUMNS = json.loads(CAPS.read_text())
Sizes = dict[str, dict[str, dict[str, int]]]


@pytest.fixture(scope="module")
def sizes() -> Sizes:
    return measure_all()


@pytest.mark.parametrize("name", COLUMNS["default"])
@pytest.mark.parametrize("column", COLUMNS)
def test_no_project_is_larger_than_its_cap(sizes: Sizes, column: str, name: str) -> None:
    largest, answers = max((found[name], answers) for answers, found in sizes[column].items())
    assert 0 < largest <= COLUMNS[column][name], answers


def test_every_size_has_a_cap(sizes: Sizes) -> None:
    (found,) = sizes["default"].values()
    assert all(column.keys() == found.keys() for column in COLUMNS.values())


@pytest.mark.parametrize(
    ("code", "names"),
    [
        (
            "from torch.utils._pytree import tree_map\nfrom torch.utils._pytree import tree_leaves",
            {"torch.utils._pytree"},
        ),
        ("import torch\ntorch._C._log()\ntorch.distributed._tools.x", {"torch._C", "torch.distributed._tools"}),
        ("from torch.distributed.elastic.agent.server.api import LocalElasticAgent", {"LocalElasticAgent"}),
        ("import sys\nsys.excepthook = print", {"sys.excepthook ="}),
        ("worker._popen.pid", {"worker._popen"}),
        ("import os\nos._exit(self._code + __name__.__len__())\nfrom ._own import _x", set()),
    ],
)
def test_private_interfaces_are_found(code: str, names: set[str]) -> None:
    assert set(private_names(ast.parse(code), code)) == names
