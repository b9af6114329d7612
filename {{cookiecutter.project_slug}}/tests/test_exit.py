"""A job one of whose ranks dies ends and names the rank; no process is left behind; a clean run exits with 0."""

import os
import signal
from pathlib import Path

from support import RANKS, children, end_at, train


def fault(tmp_path: Path, what: str) -> dict[str, str]:
    """Return an environment in which the last rank has a fault in its third step."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time, torch\n"
        "step, steps = torch.optim.AdamW.step, []\n"
        "def faulty(self, closure=None):\n"
        "    steps.append(0)\n"
        f"    if len(steps) == 3 and os.environ['RANK'] == '{RANKS - 1}': {what}\n"
        "    return step(self, closure)\n"
        "torch.optim.AdamW.step = faulty\n"
    )
    return {"PYTHONPATH": str(tmp_path)}


def test_an_error_is_named_with_one_traceback(tmp_path: Path) -> None:
    _, err = train(tmp_path / "run", code=1, **fault(tmp_path, "raise ValueError('planted')"))
    assert err.count("Traceback") == 1 and "ValueError: planted" in err.splitlines()[-1], err


#:: if not fact("nproc") ::#
def test_a_rank_that_hangs_is_named(tmp_path: Path) -> None:
    words = ("--distributed.timeout_seconds", "6")
    _, err = train(tmp_path / "run", *words, code=1, STOP_SECONDS="3", **fault(tmp_path, "time.sleep(1e6)"))
    assert f"no report from rank(s) {RANKS - 1}" in err and "Traceback" not in err, err


#:: endif ::#
def test_a_killed_launcher_leaves_no_rank(tmp_path: Path) -> None:
    ranks: list[int] = []

    def end(launcher: int) -> None:
        ranks.extend(children(launcher)[-RANKS:])
        os.kill(launcher, signal.SIGKILL)

    end_at(4, tmp_path, end, "--data.num_workers", "1")  # It waits for all that hold the output, loaders included.
    assert len(ranks) == RANKS and not any(Path(f"/proc/{pid}").exists() for pid in ranks)
