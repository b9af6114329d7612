"""Start NPROC ranks on this machine with ``torch.multiprocessing.spawn``; each gets the same command line.

launch ── spawn ──┬── rank 0: main(argv)        ``Ranks`` says how they end: what is forwarded, awaited and reported
                  ├── rank 1: main(argv)
                  └── ...
"""

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from ..config import UserError
from .ending import run_and_exit
from .environment import Nodes, exit_with_error, first_line, read_nodes
from .ranks import Ranks
from .signals import STOP_SIGNALS, hold_back, start_resource_tracker


def launch(nproc: int, argv: Sequence[str]) -> None:
    """Run the command line ``argv`` in ``nproc`` processes and wait for them; when one fails, end the others.

    For a run on several machines, the environment specifies which one this is, and where the first one is: NODES,
    NODE_RANK, HEAD and PORT, without which it is rejected.

    Raises:
        SystemExit: with the exit code of the rank that failed first, or 128 plus the number of a signal.
    """
    # Only now: PyTorch takes seconds to import, and Ctrl-C would end that with a traceback.
    from torch.multiprocessing.spawn import spawn

    nodes = read_nodes()
    first_rank, store = nodes.rank * nproc, open_store(nodes)
    os.environ.update(MASTER_ADDR=nodes.head, MASTER_PORT=str(store.port if store else nodes.port))
    os.environ.update(WORLD_SIZE=str(nproc * nodes.count), LOCAL_WORLD_SIZE=str(nproc))
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True")
    ranks = Ranks({}, patience=float(os.environ.get("STOP_SECONDS") or "60"))
    start_resource_tracker()
    with forward_signals(ranks):
        with hold_back():
            context = spawn(run_rank, args=(first_rank, argv), nprocs=nproc, join=False)
            assert context is not None
            ranks.processes = dict(enumerate(context.processes, first_rank))
        while ranks.running() and not ranks.received:
            time.sleep(0.1)
            ranks.check()
        ranks.end(terminate=False)
    if code := ranks.exit_code():
        sys.exit(code)


def open_store(nodes: Nodes) -> Any:
    """Return the store for the ranks' rendezvous, which the first machine holds; None on the others."""
    from torch.distributed import DistError, TCPStore

    if nodes.rank == 0:
        try:  # On one machine, the system chooses a free port.
            return TCPStore(nodes.head, nodes.port, is_master=True, wait_for_workers=False)
        except DistError as error:
            exit_with_error(f"no rendezvous at {nodes.head}:{nodes.port}; is HEAD this machine? ({first_line(error)})")
    return None


def run_rank(local_rank: int, first_rank: int, argv: Sequence[str]) -> None:
    """Run one rank of this machine, whose ranks start at ``first_rank``."""
    os.environ.update(RANK=str(first_rank + local_rank), LOCAL_RANK=str(local_rank))
    # By name, as any launcher starts a program: this room imports nothing from the program that it starts.
    main = import_module("{{ cookiecutter.__package }}.__main__").main
    # It prints an exception here and now, as any program does; PyTorch would leave it in a file for the launcher.
    run_and_exit(main, argv)


@contextmanager
def forward_signals(ranks: Ranks) -> Iterator[None]:
    """Forward stop signals to the ranks, which save and exit by themselves."""
    previous = {number: signal.signal(number, ranks.forward) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        launch(int(os.environ.get("NPROC", "1")), sys.argv[1:])
    except UserError as error:
        exit_with_error(str(error))
