"""Failure reports: when ranks wait in vain, one of them names the failed rank.

    error: after step 3, no report from rank 1: it died, hangs, is late or is in another collective; rank 0 waited at
    parallel.py:74, forward_backward. See 'Troubleshooting' in README.md

A collective that fails shows that some rank did not answer, but often not which one. So each rank that fails writes a
report to the store of the rendezvous, and reads those of the others; the rank without a report is the missing one.
"""

import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from tqdm import tqdm

from ..config import UserError
from ..launch import is_first_on_machine, print_error
from .memory import explain_out_of_memory

PACKAGE_DIR = Path(__file__).parents[1]
# Seconds to wait for the reports of other ranks: those that wait for the same rank give up at about the same time.
PATIENCE = 5.0


@dataclass
class Report:
    """What a failed rank reports to the others: whether it was waiting for them, where, and its error."""

    waited: bool
    location: str
    error: str


@contextmanager
def report_failures(describe_progress: Callable[[], str]) -> Iterator[None]:
    """Wrap what ranks do together: if one of them fails, another reports which one, and the progress of the run."""
    try:
        with explain_dead_loader(describe_progress), explain_out_of_memory(describe_progress):
            yield
    except Exception as error:
        if dist.get_world_size() > 1 and not hasattr(error, "__notes__"):
            report(error, describe_progress())
        raise


@contextmanager
def explain_dead_loader(describe_progress: Callable[[], str]) -> Iterator[None]:
    """Replace an error that comes of the death of a loader process by one that names it.

    PyTorch's handler of SIGCHLD raises another error wherever this process is, also in the middle of a report.
    """
    try:
        yield
    except Exception as error:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        text = str(error)
        try:
            torch._C._error_if_any_worker_fails()
        except RuntimeError as death:
            text = str(death)
        if text.startswith("DataLoader worker"):
            remedy = "its memory may have run out: lower data.num_workers"
            raise ConnectionError(f"{describe_progress()}: {text.strip()} ({remedy})") from None
        raise


def report(error: Exception, progress: str) -> None:
    """Write a report, and print what this rank knows; one rank that was waiting prints the last line of the run."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    own = Report(is_collective_error(error), locate(error), text)
    if not own.waited:
        error.add_note(f"rank {rank}, {progress}")
        if not isinstance(error, UserError):
            print_traceback(error)  # Before the report, because the last line follows that.
    reports, store_gone = exchange_reports(rank, world_size, own)
    if not own.waited:
        return
    line = f"{explain(reports, world_size, progress, store_gone)}. See 'Troubleshooting' in README.md"
    is_first = rank == min(other for other in reports if reports[other].waited)
    if is_first and all(report.waited for report in reports.values()):
        print_traceback(error)  # Otherwise that of the failed rank, which it has printed, is enough.
    if is_first:
        # Now: a launcher that ends this rank may leave no time for more.
        tqdm.write(f"error: {line}", file=sys.stderr)
        sys.stderr.flush()
    if is_first or not is_first_on_machine():
        forget_traceback()  # It would bury the line.
    error.add_note(line)


def record_collectives(folder: Path) -> None:
    """Let NCCL's watchdog write the last collectives of each rank to ``folder`` when one of them takes too long.

    Call this before the process group exists. The variables are those of PyTorch's flight recorder.
    """
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", f"{folder}/collectives_")  # PyTorch appends the rank.


def print_traceback(error: Exception) -> None:
    """Print the traceback of an error now, and not when the error ends this process."""
    sys.excepthook(type(error), error, error.__traceback__)
    forget_traceback()


def forget_traceback() -> None:
    """Print no traceback when an error ends this process."""
    sys.excepthook = lambda *_: None


def end_failed_rank(error: Exception) -> NoReturn:
    """Print an error, if no report has, and end this process at once, with 2 for a UserError and otherwise with 1.

    To leave the process group in order, NCCL would wait for collectives that a failed rank never joins.
    """
    if isinstance(error, UserError):
        print_error(str(error))
    else:
        sys.excepthook(type(error), error, error.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(2 if isinstance(error, UserError) else 1)


def is_collective_error(error: Exception) -> bool:
    """Return whether this is the error of a rank that waited for others; gloo's errors have no type of their own."""
    is_gloo = isinstance(error, RuntimeError) and re.search("gloo|collective|monitoredBarrier|pair closure", str(error))
    return bool(is_gloo) or isinstance(error, dist.DistError)


def locate(error: Exception) -> str:
    """Return the line of this package that raised the error, or that called the helper in this room that did."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if PACKAGE_DIR in Path(frame.filename).parents
    ]
    outside = [frame for frame in frames if Path(frame.filename).parent != Path(__file__).parent] or frames
    if not outside:
        return "an unknown line"
    return f"{Path(outside[-1].filename).relative_to(PACKAGE_DIR)}:{outside[-1].lineno}, {outside[-1].name}"


def exchange_reports(rank: int, world_size: int, own: Report) -> tuple[dict[int, Report], bool]:
    """Write this rank's report; if it was waiting, also gather those of the others, for up to ``PATIENCE``.

    Returns the reports by rank, and whether the store is gone, so that some may be missing.
    """
    store, reports = dist.distributed_c10d._get_default_store(), {rank: own}
    gone = threading.Event()

    def exchange() -> None:
        try:
            store.set(f"failure/{rank}", json.dumps(asdict(own)))
            while own.waited and len(reports) < world_size:
                for other in set(range(world_size)) - reports.keys():
                    if store.check([f"failure/{other}"]):
                        reports[other] = Report(**json.loads(store.get(f"failure/{other}")))
                time.sleep(0.1)
        except dist.DistError:
            gone.set()

    # In a thread: a store behind a broken connection neither answers nor fails.
    thread = threading.Thread(target=exchange, daemon=True)
    try:
        thread.start()
        thread.join(PATIENCE)
    except RuntimeError:  # There is no memory for one, which may be what this rank has to report.
        if not own.waited:
            exchange()
    return dict(reports), gone.is_set()


def explain(reports: Mapping[int, Report], world_size: int, progress: str, store_gone: bool) -> str:
    """Return which ranks failed; if none did, which ones sent no report; if all reported, where they waited."""
    by_rank = sorted(reports.items())
    failed = [f"rank {r} failed at {report.location}: {report.error}" for r, report in by_rank if not report.waited]
    waited = [f"rank {r} waited at {report.location}" for r, report in by_rank if report.waited]
    silent = ", ".join(str(rank) for rank in range(world_size) if rank not in reports)
    if failed:
        return f"{progress}, {'; '.join(failed)}"
    if silent and store_gone:
        return f"{progress}, no report from rank 0 or its launcher: it is gone, with the ranks' store; {waited[0]}"
    if silent:
        reasons = "it died, hangs, is late or is in another collective"
        return f"{progress}, no report from rank {silent}: {reasons}; {waited[0]}"
    if len({report.location for report in reports.values()}) == 1:
        return (
            f"{progress}, all ranks waited at {by_rank[0][1].location}: a message took longer than "
            "distributed.timeout_seconds (startup_timeout_seconds before the second step), or the connection between "
            "them broke"
        )
    return f"{progress}, the ranks waited for each other in different collectives: {'; '.join(waited)}"
