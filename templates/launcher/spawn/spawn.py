"""Start NPROC ranks with ``torch.multiprocessing.spawn``; in a notebook: ``launch(["train"], nproc=2)``."""

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


def run_rank(local_rank: int, first_rank: int, environment: dict[str, str], argv: list[str]) -> None:
    """Run the command line as one rank of this machine, whose ranks start at ``first_rank``."""
    os.environ |= environment | {"RANK": str(first_rank + local_rank), "LOCAL_RANK": str(local_rank)}
    main(argv)


def launch(argv: list[str], nproc: int) -> int:
    """Run the ranks of this machine; returns 0, what the first that failed returned, or 128 plus a stop signal."""
    nodes, node_rank = int(os.environ.get("NODES", "1")), int(os.environ.get("NODE_RANK", "0"))
    host, port = os.environ.get("HEAD", "127.0.0.1"), int(os.environ.get("PORT", "29400")) if nodes > 1 else 0
    store = dist.TCPStore(host, port, is_master=node_rank == 0, wait_for_workers=False)  # Port 0: any free one.
    environment = {"WORLD_SIZE": str(nodes * nproc), "MASTER_ADDR": host, "MASTER_PORT": str(store.port)}
    environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # Rank 0 opens no store; this one remains if it fails.
    os.environ.setdefault("PYTHONHASHSEED", "0")  # Ranks see sets in the same order.
    # Hide what a failed rank leaves, PyTorch's hint on pickling, which loader.py gives, and one against train.exact.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker,ignore:Got pickle error,ignore:TensorFloat32")
    received: list[int] = []
    handlers = {number: signal.signal(number, lambda number, _: received.append(number)) for number in STOP_SIGNALS}
    context, first = mp.get_context("spawn"), node_rank * nproc
    ranks = [context.Process(target=run_rank, args=(i, first, environment, argv)) for i in range(nproc)]
    for rank in ranks:
        rank.start()
    code = wait(ranks, received)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return code


def wait(ranks: list[Any], received: list[int]) -> int:
    """Wait for all ranks; after a failure, or a stop signal in ``received``, they have STOP_SECONDS to end."""
    deadline, failed, codes = math.inf, list[tuple[int, int]](), list[int | None]([None])
    while None in codes:
        time.sleep(0.1)
        codes = [rank.exitcode for rank in ranks]
        failed = failed or sorted((code, number) for number, code in enumerate(codes) if code)
        is_over = time.monotonic() > deadline
        if is_over or (deadline == math.inf and (failed or received)):
            deadline = time.monotonic() + float(os.environ.get("STOP_SECONDS", "60"))
            for rank in ranks:
                rank.kill() if is_over else rank.terminate()  # A rank that trains saves, and ends by itself.
    for code, number in failed[:1]:
        if code == -signal.SIGKILL or (code < 0 and not received):
            print(f"error: local rank {number} was ended by {signal.Signals(-code).name}", file=sys.stderr)
    return 128 + received[0] if received else max(1, failed[0][0]) if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(launch(sys.argv[1:], int(os.environ.get("NPROC", "2"))))
    except dist.DistError as error:
        sys.exit(f"error: no rendezvous at HEAD and PORT: {str(error).splitlines()[0]}")
