"""A skip that is not listed fails in continuous integration, wherever it happens; outside, it is only reported."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from conftest import run
from skips import ALLOWED, TWO_MACHINES

TESTS = Path(__file__).parent
LISTED = f"""
import pytest

def test_two_healthy_machines_pass():
    pytest.skip("{TWO_MACHINES}")
"""
SKIPS = {
    "in the test": "import pytest\ndef test(): pytest.skip('no Slurm here')",
    "by a mark": "import pytest\n@pytest.mark.skipif(True, reason='no Slurm here')\ndef test(): pass",
    "of a file": "import pytest\npytest.skip('no Slurm here', allow_module_level=True)",
    "of a listed test": LISTED.replace(TWO_MACHINES, "no Slurm here"),
    "for a listed reason": LISTED.replace(TWO_MACHINES, f"{TWO_MACHINES}: no Slurm here").replace("two_", "three_"),
}


def run_pytest(folder: Path, source: str, ci: str, expect: int) -> str:
    """Run one file of tests on a worker process, with the plugin, and return what pytest printed."""
    (folder / "test_doctor.py").write_text(source)
    words = ["-m", "pytest", "-ra", "-p", "skips", "-n", "1", "test_doctor.py"]
    return run(sys.executable, *words, cwd=folder, expect=expect, PYTHONPATH=str(TESTS), CI=ci).stdout


@pytest.mark.parametrize("skip", SKIPS)
def test_an_unlisted_skip_fails_in_continuous_integration(tmp_path: Path, skip: str) -> None:
    output = run_pytest(tmp_path, SKIPS[skip], ci="true", expect=1)
    assert re.search("tests/skips.py does not list: .*no Slurm here", output)


def test_other_skips_are_only_reported(tmp_path: Path) -> None:
    listed = run_pytest(tmp_path, LISTED, ci="true", expect=0)
    outside = run_pytest(tmp_path, SKIPS["in the test"], ci="", expect=0)
    assert TWO_MACHINES in listed and "no Slurm here" in outside


@pytest.mark.parametrize(("test", "reason"), sorted(ALLOWED))
def test_each_listed_skip_exists(test: str, reason: str) -> None:
    file, name = test.split("::")
    assert re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.MULTILINE)
    sources = "".join(path.read_text() for path in TESTS.glob("*.py") if path.name not in ("skips.py", "test_skips.py"))
    assert reason in sources
