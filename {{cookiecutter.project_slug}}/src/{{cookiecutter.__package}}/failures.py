"""Failures: which rank failed or is silent, and which rank prints it."""

import re
import signal
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NoReturn

import torch.distributed as dist

from .config import UserError
from .distributed import STOP_SIGNALS, Process, exit_now

GLOO = r"(Gloo .*)?\[\S*gloo/|Application timeout caused pair closure"  # How its errors begin.
CLEAR = "state_dict for|a deterministic|(not|that) require.{1,4}grad|finished reduction|FSDP does not|have NCCL|no GPUs"
REPORT_SECONDS = 3.0  # How long ranks that waited in vain are counted, to find those that are silent.


def fail(error: Exception, process: Process) -> NoReturn:
    """End this process. The first rank that fails prints why; if all waited, rank 0 prints which ranks are silent."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    try:
        time.sleep(0.2 + 0.5 * (process.rank > 0))  # Rank 0 is the one to print what all ranks find.
    except RuntimeError as named:  # A loader process died, and its broken connection was found first.
        error = named
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    if re.search(CLEAR, str(error)):
        error = UserError(str(error).replace("you set", "train.exact sets"))
    waited = isinstance(error, dist.DistError) or bool(re.match(GLOO, str(error.__cause__ or error)))
    text = " ".join(re.sub(r"(?s)\[\S*gloo/\S*\]|.*Traceback .*\n\b", "", f"{type(error).__name__}: {error}").split())
    try:
        reason, prints = ThreadPoolExecutor(1).submit(find_reason, text, waited, process).result(4 * REPORT_SECONDS)
    except (RuntimeError, TimeoutError):
        reason, prints = "no report from rank 0: dead, or cut off", process.rank % -(-process.world_size // 8) == 0
    line = f"rank {process.rank} waited in vain: {reason}" if waited else text.removeprefix("UserError: ")[:2000]
    with suppress(OSError):  # Nobody may read it.
        if prints and not waited and not isinstance(error, UserError):
            traceback.print_exception(error)
        elif prints:
            print("error:", line, file=sys.stderr)
    exit_now(2 if "failed with UserError" in reason else 1)


def find_reason(text: str, waited: bool, process: Process) -> tuple[str, bool]:
    """Return why the run ends, and whether this rank prints it; a rank that waited leaves, so that others notice."""
    store, me, every = process.store, str(process.rank), {*range(process.world_size)}
    if not waited:
        first = store.compare_set("failure", "", own := f"rank {me} failed with {text}").decode()
        return first, first == own or "failed with" not in first
    store.set(f"waited{me}", "")
    # If waits timed out, one rank looks for silent ones; if a connection was closed, the launcher names the rank.
    silent = every if re.search("imed? ?out", text) and store.compare_set("searches", "", me).decode() == me else set()
    deadline = time.monotonic() + (REPORT_SECONDS if silent else REPORT_SECONDS + 1 if process.rank == 0 else 0)
    while time.monotonic() < deadline and not store.check(["failure"]):
        time.sleep(0.1)
        silent = {rank for rank in silent if not store.check([f"waited{rank}"])}
    if ranks := str(sorted(silent))[1:-1]:
        store.compare_set("failure", "", f"no report from rank(s) {ranks}, which died, hang or are late ({text[:200]})")
    reason = store.get("failure").decode() if store.check(["failure"]) else f"a rank died or left ({text[:200]})"
    return reason, process.rank == 0 or 0 in silent
