"""The variables on docs/nccl.md are in NCCL's library, and those that are gone are not."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest
from conftest import BIN, TEMPLATE, run

pytestmark = pytest.mark.weekly


def test_variables_are_in_the_library_or_gone(tmp_path: Path) -> None:
    text = (TEMPLATE / "docs" / "nccl.md").read_text()
    package, version = re.findall(r"`(nvidia-nccl-\w+)` ([\d.]+)", text)[0]
    run(BIN / "pip", "download", "--quiet", "--no-deps", f"{package}=={version}", cwd=tmp_path)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        library = wheel.read(next(name for name in wheel.namelist() if "/libnccl.so" in name))
    rows = re.findall(r"^\| (`NCCL_.*?) \| (.*)", text, re.MULTILINE)
    old = set(re.findall(r"NCCL_[A-Z0-9_]+", " ".join(row[0] for row in rows[-5:]))) | {"NCCL_BUFFLE"}
    new = set(re.findall(r"(?<!TORCH_)NCCL_[A-Z0-9_]+", text)) - old
    for names, expected in ((new, True), (old, False)):
        for name in names:
            assert bool(re.search(rf"\b{name}\b".encode(), library)) == expected, name
    assert len(new) > 15 and len(old) > 6
