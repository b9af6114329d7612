"""docs/collectives.md, docs/fsdp.md: programs print what is shown; a rank that does not come costs the others."""

from __future__ import annotations

import re
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
from conftest import BIN, CONTEXT, TEMPLATE, Bake, blocks, run, started, wait_until
from torch.distributed.constants import default_pg_timeout

PAGE = TEMPLATE / "docs" / "collectives.md"


def test_the_program_prints_what_the_page_shows(tmp_path: Path) -> None:
    (tmp_path / ".venv").symlink_to(BIN.parent)
    (program, edit, _), (command,), (shown, _) = (blocks(PAGE, kind) for kind in ("python", "bash", "text"))
    (tmp_path / "collectives.py").write_text(program)
    result = run("bash", "-ec", command, cwd=tmp_path)
    assert (result.stdout, result.stderr) == (shown, "")
    program = "import datetime, time\n\n" + program.replace("dist.destroy_process_group()\n", edit)
    program = program.replace('"gloo")', '"gloo", timeout=datetime.timedelta(seconds=5))')
    (tmp_path / "collectives.py").write_text(program)
    result = run("bash", "-ec", command, cwd=tmp_path, code=1)
    assert re.findall(r"^rank \d goes on$", result.stdout, re.MULTILINE) == ["rank 2 goes on"]
    errors = re.findall("^.*RuntimeError: .*$", result.stderr, re.MULTILINE)
    assert errors and not any("rank 2" in re.sub(r"^\[rank\d\]", "", error) for error in errors)
    assert default_pg_timeout == timedelta(minutes=30)


def test_stacks_show_which_rank_the_others_wait_for(tmp_path: Path) -> None:
    (tmp_path / ".venv").symlink_to(BIN.parent)
    program, (_, command, spy), shown = blocks(PAGE, "python")[2], blocks(PAGE, "sh"), blocks(PAGE, "text")[1]
    started_all = "if rank != 2:\n"
    assert program.count(started_all) == 1
    program = "import faulthandler\n" + program.replace(
        started_all,
        # In a file of each rank: in one, the lines of several would mix.
        f"faulthandler.dump_traceback_later(1, repeat=True, file=open(f'stack{{rank}}', 'w'))\n{started_all}",
    )
    (tmp_path / "hang.py").write_text(program)

    def waits_in(name: str) -> list[str]:
        return sorted(path.name for path in tmp_path.glob("stack?") if f" in {name}\n" in path.read_text())

    with started("bash", "-c", f"exec env {command.strip()} >lines", cwd=tmp_path) as launcher:
        wait_until(lambda: len(waits_in("average")) + len(waits_in("load_batch")) == 4, "four stacks")
        assert waits_in("average") == ["stack0", "stack1", "stack3"] and waits_in("load_batch") == ["stack2"]
        if (BIN / "py-spy").exists():
            dump = spy.splitlines()[1].replace("$(pgrep -of hang.py)", str(launcher.pid))
            printed = run("bash", "-c", dump, cwd=tmp_path).stdout
            frames = [
                Counter(re.findall(r"^    (\S+) \(.*?(\w+\.py):", text, re.MULTILINE)) for text in (printed, shown)
            ]
            assert frames[0] == frames[1]
            assert len(frames[0]) == 4


@pytest.mark.weekly
def test_the_first_lesson_starts_in_an_empty_folder(tmp_path: Path) -> None:
    clone = blocks(PAGE, "sh")[0].replace(CONTEXT["_repository"], f"{TEMPLATE} ddp-template")
    run("bash", "-ec", clone, cwd=tmp_path)
    project = tmp_path / "my-experiment"
    (project / "collectives.py").write_text(blocks(PAGE, "python")[0])
    assert run("bash", "-ec", *blocks(PAGE, "bash"), cwd=project).stdout == blocks(PAGE, "text")[0]
    assert (project / ".." / "ddp-template" / "docs" / "losses.py").exists()


@pytest.mark.weekly
def test_sharded_loops_have_the_shapes_and_the_losses_of_the_page(bake: Bake) -> None:
    project, page = bake(), TEMPLATE / "docs" / "fsdp.md"
    (project / ".venv").symlink_to(BIN.parent)
    (program, count), commands, texts = (blocks(page, kind) for kind in ("python", "bash", "text"))
    (project / "count.py").write_text(count)
    assert run("bash", "-ec", commands.pop(), cwd=project).stdout == texts.pop()
    (project / "sharded.py").write_text(program)
    assert len(program.splitlines()) <= 60
    for command, text in zip(commands, texts, strict=True):
        printed = run("bash", "-ec", command, cwd=project).stdout
        assert all(line in printed for line in re.findall("^rank . holds .*|^.* are right", text, re.MULTILINE))
        for where, loss in re.findall("^(rank .*, loss )(.*)$", text, re.MULTILINE):
            assert float(printed.split(where)[1][:5]) == pytest.approx(float(loss), abs=0.01)
    again = run("bash", "-ec", commands[0].split("\n", 1)[1], cwd=project).stdout
    assert "epoch" not in again and "351 of 360 are right" in again
