"""Start NPROC ranks like torch.multiprocessing.spawn; in a notebook: launch(["train"], nproc=2)."""

import math
import os
import signal
import sys
import time
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from .__main__ import main
from .distributed import STOP_SIGNALS

# The warnings are about what a failed rank leaves, about pickling (on which loader.py gives better
# advice), and against train.exact.
HIDDEN_WARNINGS = "ignore:resource_tracker,ignore:Got pickle error,ignore:TensorFloat32"


def launch(argv: list[str], nproc: int) -> int:
    """Run this machine's ranks; return 0, the code of a failed one, or 128 plus a stop signal."""
    # scripts/launch.sh has checked these variables, which a notebook may set, too.
    nodes = int(os.environ.get("NODES", "1"))
    node_rank = int(os.environ.get("NODE_RANK", "0"))
    host = os.environ.get("HEAD", "127.0.0.1")
    # Port 0 stands for any that is free.
    port = 0
    if nodes > 1:
        port = int(os.environ.get("PORT", "29400"))
    # The store is in this process, so that it outlives rank 0, whose failure the others read there.
    store = dist.TCPStore(host, port, is_master=node_rank == 0, wait_for_workers=False)
    environment = {
        "WORLD_SIZE": str(nodes * nproc),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(store.port),
        # Rank 0 connects to the store, instead of opening one itself.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    # Ranks would otherwise see the elements of a set in different orders.
    os.environ.setdefault("PYTHONHASHSEED", "0")
    os.environ.setdefault("PYTHONWARNINGS", HIDDEN_WARNINGS)
    received_signals: list[int] = []
    previous_handlers = {}
    for number in STOP_SIGNALS:
        # wait() ends the ranks when it finds a signal in the list.
        handler = signal.signal(number, lambda received, _: received_signals.append(received))
        previous_handlers[number] = handler
    processes = start_ranks(nproc, node_rank * nproc, environment, argv)
    exit_code = wait(processes, received_signals)
    # A notebook goes on after the run, and has to be interruptible.
    for number, handler in previous_handlers.items():
        signal.signal(number, handler)
    return exit_code


def start_ranks(
    nproc: int, first_rank: int, environment: dict[str, str], argv: list[str]
) -> list[Any]:
    """Start the ranks of this machine, which are numbered from ``first_rank``."""
    # A forked process would share the state of PyTorch's threads and devices with this one.
    context = mp.get_context("spawn")
    processes = []
    for local_rank in range(nproc):
        arguments = (first_rank + local_rank, local_rank, environment, argv)
        process = context.Process(target=run_rank, args=arguments)
        process.start()
        processes.append(process)
    return processes


def run_rank(rank: int, local_rank: int, environment: dict[str, str], argv: list[str]) -> None:
    """Run the command line as one rank, in a process of its own."""
    # The command line finds the other ranks by these variables.
    os.environ.update(environment)
    os.environ["RANK"] = str(rank)
    os.environ["LOCAL_RANK"] = str(local_rank)
    main(argv)


def wait(processes: list[Any], received_signals: list[int]) -> int:
    """Wait for all ranks; a failure or a stop signal leaves them STOP_SECONDS to save and end."""
    stop_seconds = float(os.environ.get("STOP_SECONDS", "60"))
    deadline = math.inf
    failure: tuple[int, int] | None = None
    exit_codes: list[Any] = [None]
    # The exit code of a process is None while it runs.
    while None in exit_codes:
        time.sleep(0.1)
        exit_codes = [process.exitcode for process in processes]
        # The first failure counts: ranks that lose their connection fail because of it.
        if failure is None:
            failures = [(code, local_rank) for local_rank, code in enumerate(exit_codes) if code]
            # A signal is the cause of other failures, and its exit code is negative.
            failure = min(failures, default=None)
        # Ranks that could not save in time are killed.
        if time.monotonic() > deadline:
            for process in processes:
                process.kill()
        elif deadline == math.inf and (failure or received_signals):
            deadline = time.monotonic() + stop_seconds
            # Ranks save when they get SIGTERM, and end by themselves.
            for process in processes:
                process.terminate()
    if failure is not None:
        exit_code, local_rank = failure
        by_signal = exit_code < 0
        is_stopped = bool(received_signals) and exit_code != -signal.SIGKILL
        # A rank that fails by itself prints why, and a stop signal needs no reason.
        if by_signal and not is_stopped:
            signal_name = signal.Signals(-exit_code).name
            print(f"error: local rank {local_rank} was ended by {signal_name}", file=sys.stderr)
    if received_signals:
        return 128 + received_signals[0]
    if failure is None:
        return 0
    # The code of a rank that a signal ended is negative, which no exit code may be.
    return max(1, failure[0])


if __name__ == "__main__":
    try:
        sys.exit(launch(sys.argv[1:], int(os.environ.get("NPROC", "2"))))
    except dist.DistError as error:
        first_line = str(error).splitlines()[0]
        sys.exit(f"error: no rendezvous at HEAD and PORT: {first_line}")
