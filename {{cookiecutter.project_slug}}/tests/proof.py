"""Make a table of what the tests measured: ``make proof`` writes proof.md and proof.json."""

import json
import os
import platform
import subprocess
import time
from typing import Any
from xml.etree import ElementTree

import torch

from support import ROOT, STEPS

COLUMNS = ["test", "loss", "grad_norm", "weights", "ranks", "holds", "seconds"]
TEXT = f"""# One result, however the work is split

The largest relative deviations in {STEPS} steps from a loop in one process that splits nothing
(tests/plain.py), on the CPU, and their bounds. Where the column `ranks` says bitwise, weights,
optimizer, losses, norms and evaluations equal those of the first split in all bits. Without it,
bf16 and fp16 are compared with the first split in that precision: the bound is twice the deviation
of smaller micro-batches. Resumed runs name what they are equal to: all bits, or 1e-5. If a test
does not hold, `.venv/bin/pytest tests/test_experiment.py` names what depends on the split.
"""


def read_row(case: ElementTree.Element) -> dict[str, Any]:
    """Return a test's row: its name, what it measured, whether it holds, and its seconds."""
    measured = {item.attrib["name"]: item.attrib["value"] for item in case.iter("property")}
    holds: bool | str = case.find("failure") is None and case.find("error") is None
    skipped = case.find("skipped")
    if skipped is not None:
        holds = skipped.attrib["message"]
    seconds = round(float(case.attrib["time"]))
    return {"test": case.attrib["name"], **measured, "holds": holds, "seconds": seconds}


def describe_machine() -> dict[str, str]:
    """Return the date, the commit, and what the tests ran on."""
    command = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    versions = {"torch": torch.__version__, "platform": platform.platform()}
    device = f"CPU, {os.cpu_count()} processors"
    return {"date": time.strftime("%F"), "commit": commit.strip(), **versions, "device": device}


def main() -> None:
    """Write proof.md and proof.json from pytest's report, proof.xml."""
    rows = [read_row(case) for case in ElementTree.parse(ROOT / "proof.xml").iter("testcase")]
    machine = describe_machine()
    (ROOT / "proof.json").write_text(json.dumps({**machine, "rows": rows}, indent=2) + "\n")
    table = [COLUMNS, ["---"] * len(COLUMNS)]
    table += [[str(row.get(name, "")) for name in COLUMNS] for row in rows]
    lines = [f"| {' | '.join(cells)} |" for cells in table]
    head = ", ".join(f"{name} {value}" for name, value in machine.items())
    (ROOT / "proof.md").write_text("\n".join([TEXT, head, "", *lines]) + "\n")


if __name__ == "__main__":
    main()
