"""Make a table of what the tests measured, from pytest's report: ``make proof`` writes proof.md and proof.json."""

import json
import os
import platform
import subprocess
import time
from xml.etree import ElementTree

import torch

from support import ROOT, STEPS

COLUMNS = ["loss", "grad_norm", "weights", "holds", "seconds"]
TEXT = f"""# One result, however the work is split

The largest relative deviations in {STEPS} steps from a loop in one process that splits nothing (tests/plain.py), on the
CPU, and their bounds. In bf16 and fp16: from the first split in that precision, and twice the deviation of its
micro-batches, another order of the same sums. Runs resumed on as many ranks are equal bit by bit, on another number
to 1e-5, as are evaluations. If a test does not hold, the result depends on the split;
`.venv/bin/pytest tests/test_experiment.py` names in words on what.
"""

rows = []
for case in ElementTree.parse(ROOT / "proof.xml").iter("testcase"):
    numbers = {each.attrib["name"]: each.attrib["value"] for each in case.iter("property")}
    skipped = [each.attrib["message"] for each in case.iter("skipped")]
    holds = skipped[0] if skipped else not [*case.iter("failure"), *case.iter("error")]
    rows.append({"test": case.attrib["name"], **numbers, "holds": holds, "seconds": round(float(case.attrib["time"]))})
command = ["git", "describe", "--always", "--dirty"]
commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
head = {"date": time.strftime("%F"), "commit": commit, "torch": torch.__version__, "platform": platform.platform()}
head["device"] = f"CPU, {os.cpu_count()} processors"
(ROOT / "proof.json").write_text(json.dumps({**head, "rows": rows}, indent=2) + "\n")
table = [["test", *COLUMNS], ["---"] * 6, *([row["test"], *(row.get(name, "") for name in COLUMNS)] for row in rows)]
lines = ["| " + " | ".join(map(str, cells)) + " |" for cells in table]
(ROOT / "proof.md").write_text("\n".join([TEXT, ", ".join(f"{k} {v}" for k, v in head.items()), "", *lines]) + "\n")
