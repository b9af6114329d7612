"""Run the rows of the proof, and write the certificate: proof.md, and proof.json for programs."""

import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from hashlib import sha256
from typing import Any

import pytest
import torch

from plain import build
from support import FP64_TOLERANCE, ROOT, SPLITS, STEPS, settings

TESTS = ["tests/test_split.py", "tests/test_resume.py", "tests/test_evaluate.py"]
COLUMNS = ["test", "losses", "loss", "grad_norm", "weights", "ranks", "outcome", "seconds"]
LISTED = ["Makefile", "pyproject.toml", ".github/workflows/*", "scripts/*", "tests/*", "witness/*"]
# Python or pytest would read these, and no project has them as rendered.
ADDED = ["*.py", "*.ini", ".*.ini", "*.cfg", "pytest.toml", "src/*.py", "tests/*/**/*.py"]
VARIABLES = ["PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTHONPATH"]


class Rows(dict[str, dict[str, Any]]):
    """A plugin of pytest that keeps each collected row, deselected or not, and what it gave."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            self[item.nodeid] = {"test": item.name, "outcome": "not run", "seconds": 0}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        row = self[item.nodeid]
        row.update(item.user_properties)
        row["seconds"] += round(call.duration)
        if call.excinfo is not None:
            was_skipped = call.excinfo.errisinstance(pytest.skip.Exception)
            kind = "skipped" if was_skipped else f"failed: {call.excinfo.typename}"
            row["outcome"] = f"{kind}: {call.excinfo.value}".splitlines()[0]
        elif call.when == "call":
            row["outcome"] = "holds"


def summarize(rows: list[dict[str, Any]]) -> str:
    """Return how many rows hold, of how many, and what the others give."""
    outcomes = Counter(row["outcome"] for row in rows)
    text = f"{outcomes.pop('holds', 0)} of {len(rows)} rows hold"
    return "; ".join([text, *(f"{count} {outcome}" for outcome, count in outcomes.items())])


def describe_model() -> str:
    """Return the classes and the size of the model that was made small."""
    sys.path.append(str(ROOT / "src"))
    _, _, model = build(settings())
    parts = ", ".join({type(part).__name__: "" for part in model.children()})
    size = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__} ({parts}), {size:,} parameters"


def find_oddities() -> list[str]:
    """Return what a reader should know before the figures."""
    changes = subprocess.getoutput("git status --porcelain -- . ':!proof.*'")
    found = [f"not committed: `{change}`" for change in changes.splitlines()]
    found += [f"not rendered: `{path.name}`" for pattern in ADDED for path in ROOT.glob(pattern)]
    return found + [f"`{name}={os.environ[name]}`" for name in VARIABLES if os.environ.get(name)]


def fill_in(report: dict[str, Any]) -> str:
    """Return the text of proof.md."""
    cells = [COLUMNS, ["---"] * len(COLUMNS)]
    for row in report["rows"]:
        cells.append([str(row.get(name, "")).replace("|", "\\|") for name in COLUMNS])
    table = "\n".join(f"| {' | '.join(line)} |" for line in cells)
    hashes = "\n".join(f"{digest}  {path}" for path, digest in report["files"].items())
    oddities = "; ".join(report["oddities"]) or "nothing"
    text = (ROOT / "tests" / "certificate.md").read_text()
    return text.format(**report | {"table": table, "hashes": hashes, "oddities": oddities})


def main() -> int:
    """Run the rows, and write proof.json and proof.md; returns pytest's exit code."""
    plugin = Rows()
    code = pytest.main(["-v", "-m", "", *TESTS], plugins=[plugin])
    rows = list(plugin.values())
    files = {path for pattern in LISTED + ADDED for path in ROOT.glob(pattern) if path.is_file()}
    digests = {str(path.relative_to(ROOT)): sha256(path.read_bytes()).hexdigest() for path in files}
    report = {
        "summary": summarize(rows),
        "model": describe_model(),
        "losses": next((row["losses"] for row in rows if "losses" in row), "unknown"),
        "steps": STEPS,
        "layouts": ", ".join(" ".join([f"{nproc} rank(s)", *words]) for nproc, words in SPLITS),
        "tolerance": FP64_TOLERANCE,
        "date": time.strftime("%F"),
        "commit": subprocess.getoutput("git describe --always --dirty"),
        "device": f"{platform.platform()}, CPU, {os.cpu_count()} processors",
        "torch": torch.__version__,
        "oddities": find_oddities(),
        "rows": rows,
        "rules": (ROOT / "tests" / "rules.py").read_text(),
        "files": dict(sorted(digests.items())),
    }
    (ROOT / "proof.json").write_text(json.dumps(report, indent=2) + "\n")
    (ROOT / "proof.md").write_text(fill_in(report))
    print(f"proof.md: {report['summary']}")
    return code


if __name__ == "__main__":
    sys.exit(main())
