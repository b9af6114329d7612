"""Sizes and densities of what is rendered keep the caps of caps.json, which become stricter and never looser."""

from __future__ import annotations

import ast

import pytest
from conftest import TEMPLATE
from density import count, densities
from sizes import CAPS, keeps, measure_all, private_names, worst

Measured = dict[str, dict[str, dict[str, float]]]


@pytest.fixture(scope="module")
def measured() -> Measured:
    return measure_all()


@pytest.mark.parametrize(("column", "name"), [(column, name) for column, caps in CAPS.items() for name in caps])
def test_no_project_is_beyond_a_cap(measured: Measured, column: str, name: str) -> None:
    figure, answers = worst(measured[column], column, name)
    assert keeps(column, name, figure), f"{figure:g}, the cap is {CAPS[column][name]:g}: {answers}"


def test_every_figure_has_a_cap(measured: Measured) -> None:
    (figures,) = measured["default"].values()
    assert CAPS.keys() == measured.keys()
    assert CAPS["default"].keys() == CAPS["any"].keys() == CAPS["everything"].keys()
    assert figures.keys() == {*CAPS["default"], *CAPS["at most"], *CAPS["at least"]}
    assert all(figures[name] > 0 for name in CAPS["default"])


DENSE = '''"""Free
as all docstrings."""
a, b, c = 1, 2, 3  # of three
ten = [x for x in f"{a}" if x and (y := x)]
# noqa
# 1
# A whole sentence.
same = other = f(
    ten,  # It is free.
)


def f(self, first, *rest, last=None):
    return first
'''


def test_densities_are_those_of_a_text_that_was_counted_by_hand() -> None:
    """It has 7 lines of code, of 11, 17, 6, 2, 1, 15 and 2 tokens, and 3 comments."""
    assert count(DENSE).names == {"a", "b", "c", "ten", "x", "y", "same", "other", "first", "last"}
    assert densities([DENSE]) == pytest.approx(
        {
            "tokens per line of code": 54 / 7,
            "walrus per 1,000 lines of code": 1000 / 7,
            "% of assignments packed": 100 * 2 / 3,
            "packed assignments of three names": 1,
            "% of lines with two ideas": 100 / 7,
            "% of lines of code over 100 characters": 0,
            "% of comments without a subject": 100 / 3,
            "comments per 100 lines of code": 100 * 3 / 7,
            "% of comments on their own line": 100 / 3,
            "characters of a name": 26 / 10,
        }
    )


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


def test_a_rehearsal_has_at_most_250_lines_and_five_private_interfaces() -> None:
    code = (TEMPLATE / "templates/parallelism/shared/rehearse.py").read_text()
    assert len(code.splitlines()) <= 250 and 0 < len({*private_names(ast.parse(code), code)}) <= 5
