"""Reads the experiments of experiments.txt."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lines
import pytest
from conftest import CHOICES
from lines import Changes


@dataclass
class Case:
    """An experiment under a strategy: how it is started, and what a line that refuses it has, or nothing."""

    name: str
    strategy: str
    ranks: int | None  # None where the experiment may be right or refused.
    words: list[str]
    named: str
    is_weekly: bool


def read_experiments() -> tuple[dict[str, Changes], list[Case]]:
    """Return the edits of each experiment by its name, and all cases."""
    edits, cases = dict[str, Changes](), list[Case]()
    text = re.sub("^#.*\n", "", Path(__file__).with_suffix(".txt").read_text(), flags=re.MULTILINE)
    for entry in re.split("^- ", text, flags=re.MULTILINE)[1:]:
        name, *parts = re.split(r"\n {4}(?=\S)", entry.rstrip())
        changes, outcomes = Changes(), list[str]()
        for part in parts:
            if part.startswith(("right under ", "refused under ")):
                outcomes.append(part)
            else:
                changes |= read_edit(part)
        assert name not in edits, name
        edits[name] = changes
        for outcome in outcomes or [f"any under weekly {' '.join(CHOICES['parallelism'])}"]:
            cases += read_cases(name, outcome)
    return edits, cases


def read_edit(text: str) -> Changes:
    """Return an edit of a place, or of a file."""
    where, new = re.split(r":\s", text, maxsplit=1)
    if " -> " in new:
        before, after = new.split(" -> ")
        return {(where, before): after}
    verb, place = where.rsplit(" ", 1)
    statements = re.sub("^ {8}", "", new, flags=re.MULTILINE).split("\n")
    edit = {"before": lines.before, "after": lines.after, "instead of": lines.instead}[verb]
    return edit(getattr(lines, place), *statements)


def read_cases(name: str, outcome: str) -> list[Case]:
    """Return the cases of a line such as ``refused under ddp weekly fsdp with WORDS on 2 ranks: what it has``."""
    kind, _, strategies, words, ranks, named = re.findall(
        r"^(\w+) (under) ([\w ]+?)(?: with (--.*?))?(?: on (\d) ranks)?(?:: (.*))?$", outcome
    )[0]
    often, _, weekly = strategies.partition("weekly")
    default = {"right": 2, "refused": 1}.get(kind)
    found = []
    for each in (often + weekly).split():
        number = int(ranks) if ranks else default
        found.append(Case(name, each, number, words.split(), named, each in weekly.split()))
    return found


def params(cases: list[Case]) -> list[Any]:
    """Return the cases as parameters of a test."""
    found = []
    for case in cases:
        start = " ".join([case.strategy, *case.words]) if case.named else case.strategy
        name = f"{case.name}, {start}" + (f" on {case.ranks} ranks" if case.named and case.ranks != 1 else "")
        found.append(pytest.param(case, id=name, marks=[pytest.mark.weekly] * case.is_weekly))
    return found


EDITS, CASES = read_experiments()
