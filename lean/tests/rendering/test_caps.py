"""Sizes of what is rendered stay below the caps of caps.json, in which the smallest size so far is kept."""

from __future__ import annotations

import json

import pytest
from sizes import CAPS, measure_all, private_names

COLUMNS = json.loads(CAPS.read_text())
Sizes = dict[str, dict[str, dict[str, int]]]


@pytest.fixture(scope="module")
def sizes() -> Sizes:
    return measure_all()


@pytest.mark.parametrize("column", COLUMNS)
def test_no_project_is_larger_than_its_cap(sizes: Sizes, column: str) -> None:
    caps, over = {name: entry["cap"] for name, entry in COLUMNS[column].items()}, []
    assert sizes[column]
    for answers, found in sizes[column].items():
        assert found.keys() == caps.keys() and all(found.values()), found
        over += [f"{answers}: {name} {size}, cap {caps[name]}" for name, size in found.items() if size > caps[name]]
    assert not over, "\n".join(over)


@pytest.mark.parametrize("column", COLUMNS)
def test_what_became_smaller_is_stored(sizes: Sizes, column: str) -> None:
    for name, entry in COLUMNS[column].items():
        largest = max(found[name] for found in sizes[column].values())
        assert entry["now"] is not None and entry["now"] <= largest, f"{name} of {column} is {largest}: make sizes"
        assert entry["now"] <= entry["cap"]


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
    assert set(private_names(code)) == names
