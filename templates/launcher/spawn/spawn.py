"""Start NPROC ranks on this machine with ``torch.multiprocessing.spawn``; each gets the same command line.

launch ── spawn ──┬── rank 0: main(argv)        stop signals are forwarded to the ranks, which save and exit;
                  ├── rank 1: main(argv)        when one fails, the others are terminated
                  └── ...
"""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType

from torch.distributed import DistError, TCPStore
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, ProcessRaisedException, spawn

from ..config import UserError
from .environment import exit_with_error, read_nodes


def launch(nproc: int, argv: Sequence[str]) -> None:
    """Run the command line ``argv`` in ``nproc`` processes and wait for them; when one fails, terminate the others.

    For a run on several machines, the environment specifies which one this is, and where the first one is: NODES,
    NODE_RANK, HEAD and PORT, without which it is rejected.

    Raises:
        SystemExit: with the exit code of the rank that failed first, or 128 plus the number of a signal.
    """
    nodes = read_nodes()
    host, port = nodes.head, nodes.port
    if nodes.rank == 0:
        # This process holds the store for the ranks' rendezvous; on one machine the system chooses a free port.
        try:
            store = TCPStore(host, port, is_master=True, wait_for_workers=False)
        except DistError as error:
            exit_with_error(f"no rendezvous at {host}:{port}; is HEAD this machine? ({str(error).splitlines()[0]})")
        port = store.port
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ.update(WORLD_SIZE=str(nproc * nodes.count), LOCAL_WORLD_SIZE=str(nproc))
    context = spawn(run_rank, args=(nodes.rank * nproc, argv), nprocs=nproc, join=False)
    assert context is not None
    with forward_signals(context) as received:
        wait(context)
    if received:
        sys.exit(128 + received[0])


def run_rank(local_rank: int, first_rank: int, argv: Sequence[str]) -> None:
    """Run one rank of this machine, whose ranks start at ``first_rank``."""
    os.environ.update(RANK=str(first_rank + local_rank), LOCAL_RANK=str(local_rank))
    # By name, as any launcher starts a program: this room imports nothing from the program that it starts.
    import_module("{{ cookiecutter.__package }}.__main__").main(argv)


@contextmanager
def forward_signals(context: ProcessContext) -> Iterator[list[int]]:
    """Forward stop signals to the ranks, which save and exit by themselves; yields the signals received."""
    received: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        received.append(number)
        for process in context.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def wait(context: ProcessContext) -> None:
    """Wait for the ranks.

    Raises:
        SystemExit: if a rank has failed, after its traceback was printed and the other ranks have ended.
    """
    patience = float(os.environ.get("STOP_SECONDS", "60"))
    try:
        while not context.join(grace_period=patience):
            pass
    except ProcessRaisedException as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    except ProcessExitedException as error:
        if error.exit_code < 0:  # A signal ended the rank, so it could not print anything itself.
            print(error, file=sys.stderr)
        sys.exit(error.exit_code if error.exit_code > 0 else 128 - error.exit_code)


if __name__ == "__main__":
    try:
        launch(int(os.environ.get("NPROC", "1")), sys.argv[1:])
    except UserError as error:
        exit_with_error(str(error))
