"""If a rank fails, the job ends and names it; no process is left; a good run exits with 0."""

import os
import signal
from pathlib import Path

from support import RANKS, children, end_at, train


def fault(folder: Path, action: str) -> dict[str, str]:
    """Return an environment in which the last rank runs ``action`` before its third step."""
    (folder / "sitecustomize.py").write_text(
        "import os, time, torch\n"
        "step, steps = torch.optim.AdamW.step, []\n"
        "def faulty(self, closure=None):\n"
        "    steps.append(0)\n"
        f"    if len(steps) == 3 and os.environ['RANK'] == '{RANKS - 1}': {action}\n"
        "    return step(self, closure)\n"
        "torch.optim.AdamW.step = faulty\n"
    )
    return {"PYTHONPATH": str(folder)}


def test_an_error_is_named_with_one_traceback(tmp_path: Path) -> None:
    _, err = train(tmp_path / "run", code=1, **fault(tmp_path, "raise ValueError('planted')"))
    assert err.count("Traceback") == 1 and "ValueError: planted" in err.splitlines()[-1], err


#:: if not fact("nproc") ::#
def test_a_rank_that_hangs_is_named(tmp_path: Path) -> None:
    environment = fault(tmp_path, "time.sleep(1e6)") | {"STOP_SECONDS": "3"}
    words = ("--distributed.timeout_seconds", "6")
    _, err = train(tmp_path / "run", *words, code=1, **environment)
    assert f"no report from rank(s) {RANKS - 1}" in err and "Traceback" not in err, err


#:: endif ::#
def test_a_killed_launcher_leaves_no_rank(tmp_path: Path) -> None:
    ranks: list[int] = []

    def kill(launcher: int) -> None:
        ranks.extend(children(launcher)[-RANKS:])
        os.kill(launcher, signal.SIGKILL)

    # end_at waits for all processes that hold the output: ranks and their loader processes.
    end_at(4, tmp_path, kill, "--data.num_workers", "1")
    assert len(ranks) == RANKS and not any(Path(f"/proc/{pid}").exists() for pid in ranks)
