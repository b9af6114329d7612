"""Failures: which rank failed or is silent, and which rank prints it."""

import math
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

# Gloo raises plain RuntimeErrors. Almost all of them name the line of gloo's source that failed.
GLOO_PHRASES = ("/gloo/", "Application timeout caused pair closure")
# PyTorch's errors with these words are mistakes of the user's, which need no traceback.
MISTAKES = re.compile(
    "state_dict for"  # model.weights are those of another model.
    "|a deterministic"  # train.exact is set, but an operation is never deterministic.
    "|that requires a grad"  # All parameters are frozen.
    "|not require grad"  # The loss depends on no parameter that is trained.
    "|non-contiguous parameters"  # A parameter with strides of its own cannot be sharded.
    "|uneven sharding on dim"  # A parameter's width does not divide into as many shards.
    "|have NCCL|no GPUs found|support float64"  # NCCL needs GPUs; Apple's have no fp64.
    "|sparse (tensors|gradient)"  # Only dense tensors are averaged.
    "|from the 'Sparse"
    "|'closure'|for `end` but"  # LBFGS wants to call the model. A run stays in fp64, or outside.
    "|require placement changes"  # An optimizer, such as Adafactor, cannot update shards.
    "|distribute leaf tensors"  # A layer computes its weight, as under weight_norm.
    "|non-empty tensor"  # A parameter without numbers cannot be sharded.
    "| pickle "  # Loader processes need a copy of the dataset.
    "|in fsum"  # Losses of a step are inf and -inf, and their sum is neither.
    "|has no len"  # An IterableDataset has no samples to share among ranks.
)
REPORT_SECONDS = 3.0  # Ranks whose wait times out do so within this time of each other.


def fail(error: Exception, process: Process) -> NoReturn:
    """End this process because of an error, and print why the run failed, on one rank."""
    for number in STOP_SIGNALS:  # A SIGTERM of the launcher must not interrupt this.
        signal.signal(number, signal.SIG_IGN)
    error = find_dead_loader(error, process)
    message = str(error)
    if "Traceback" not in message and MISTAKES.search(message):
        error = UserError(message)
    waited = is_about_another_rank(error)
    report = report_silent_ranks if waited else report_failure
    try:
        # If rank 0 is dead, the store may not answer for hours. A thread can be left behind.
        answer = ThreadPoolExecutor(1).submit(report, describe(error), process)
        reason, prints = answer.result(4 * REPORT_SECONDS)
    except (RuntimeError, TimeoutError):
        reason = "no report from rank 0: dead, or cut off"
        # Without the store, ranks cannot agree on which one prints: at most eight do.
        prints = process.rank % math.ceil(process.world_size / 8) == 0
    if waited:
        # A traceback would only show where this rank waited: print one line instead.
        error = UserError(f"rank {process.rank} waited in vain: {reason}")
    if prints:
        with suppress(OSError):  # Nobody may read the output any more.
            if isinstance(error, UserError):
                print("error:", describe(error).partition("UserError: ")[2][:2000], file=sys.stderr)
            else:
                traceback.print_exception(error)
    process.writer.shutdown()
    exit_now(2 if "failed with UserError" in reason else 1)


def find_dead_loader(error: Exception, process: Process) -> Exception:
    """Return the death of a loader process, if there was one, instead of what it caused."""
    try:
        # PyTorch's handler of SIGCHLD raises a RuntimeError if a loader process died: wait for it.
        # The first rank to report prints. If all fail, that is rank 0: the others wait longer.
        time.sleep(0.2 if process.rank == 0 else 0.7)
    except RuntimeError as dead_loader:
        error = dead_loader
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    return error


def is_about_another_rank(error: Exception) -> bool:
    """Return whether this rank only waited for another one: in the store, by gloo or by NCCL."""
    # Some collectives run inside code of PyTorch that wraps every error in one of its own.
    original = error.__cause__ or error
    if isinstance(error, dist.DistError) or isinstance(original, dist.DistError):
        return True
    message = str(original)
    if "Traceback (most recent call last)" in message:
        return False  # A loader process sends its traceback as text, with paths like gloo's.
    return isinstance(original, RuntimeError) and any(phrase in message for phrase in GLOO_PHRASES)


def describe(error: Exception) -> str:
    """Return the type and message of an error in one line."""
    text = f"{type(error).__name__}: {error}"
    if "Traceback (most recent call last)" in text:
        # A loader process sends its traceback as text, whose last line is its error.
        text = text.rstrip().splitlines()[-1]
    return " ".join(word for word in text.split() if "/gloo/" not in word)


def report_failure(description: str, process: Process) -> tuple[str, bool]:
    """Report that this rank failed; return why the run ends, and whether this rank prints it."""
    own_reason = f"rank {process.rank} failed with {description}"
    # The store keeps the first reason that any rank gives, and returns it to all.
    reason = process.store.compare_set("failure", "", own_reason).decode()
    # Other ranks may have called this one silent, because it failed after they had given up.
    return reason, reason == own_reason or "failed with" not in reason


def report_silent_ranks(description: str, process: Process) -> tuple[str, bool]:
    """Report that this rank waited; return why the run ends, and whether this rank prints it."""
    store = process.store
    store.set(f"waited{process.rank}", "")
    # A timeout means that a rank reports nothing; a closed connection, that a process died.
    timed_out = re.search("timeout|timed out", description.lower())
    silent_ranks = list[int]()
    # The first rank to add 1 searches: if all did, requests would grow with the square of ranks.
    if timed_out and store.add("searching_ranks", 1) == 1:
        wait_for_reason(process, REPORT_SECONDS)
        ranks = range(process.world_size)
        silent_ranks = [rank for rank in ranks if not store.check([f"waited{rank}"])]
    elif process.rank == 0:
        # Rank 0 prints, and waits for what the searching rank finds. Others just leave.
        wait_for_reason(process, REPORT_SECONDS + 1)
    if silent_ranks:
        reason = (
            f"no report from rank(s) {', '.join(map(str, silent_ranks))}, "
            "which died, hang or are late"
        )
        store.compare_set("failure", "", f"{reason} ({description[:200]})")
    reason = f"a rank died or left ({description[:200]})"
    if store.check(["failure"]):
        reason = store.get("failure").decode()
    # The searching rank prints for a rank 0 that is silent. If rank 0 was just late, both print.
    return reason, process.rank == 0 or 0 in silent_ranks


def wait_for_reason(process: Process, seconds: float) -> None:
    """Wait until a rank has given the reason why the run ends, or ``seconds`` are over."""
    deadline = time.monotonic() + seconds
    # The store can wait itself, but would print two lines of warnings in the end.
    while time.monotonic() < deadline and not process.store.check(["failure"]):
        time.sleep(0.1)
