"""docs/collectives.md: its program prints what the page shows, and a rank that does not come costs the others."""

from __future__ import annotations

import re
from pathlib import Path

from conftest import BIN, TEMPLATE, blocks, run

PAGE = TEMPLATE / "docs" / "collectives.md"


def test_the_program_prints_what_the_page_shows(tmp_path: Path) -> None:
    (tmp_path / ".venv").symlink_to(BIN.parent)
    (program, edit), (command,), (shown,) = (blocks(PAGE, kind) for kind in ("python", "bash", "text"))
    (tmp_path / "collectives.py").write_text(program)
    assert run("bash", "-ec", command, cwd=tmp_path).stdout == shown
    program = "import datetime\n\n" + program.replace("dist.destroy_process_group()\n", edit)
    program = program.replace('"gloo")', '"gloo", timeout=datetime.timedelta(seconds=5))')
    (tmp_path / "collectives.py").write_text(program)
    result = run("bash", "-ec", command, cwd=tmp_path, code=1)
    assert re.findall(r"^rank \d goes on$", result.stdout, re.MULTILINE) == ["rank 2 goes on"]
    assert result.stderr.count("RuntimeError: ") >= 1
