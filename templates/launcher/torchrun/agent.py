"""torchrun's agent, the part of it that starts and watches the ranks of this machine, with the manners of this package.

torchrun ── agent ──┬── rank 0        ``Ranks`` says how they end: what is forwarded, awaited and reported
                    ├── rank 1
                    └── ...           the rendezvous with other machines, and restarts, are torchrun's own
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, ClassVar

from torch.distributed import DistError, run
from torch.distributed.elastic.agent.server import WorkerGroup
from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api

from .environment import first_line
from .ranks import Ranks
from .signals import STOP_SIGNALS, hold_back

# What these log of the end of ranks, the lines of ``Ranks`` and of the ranks themselves say better.
LOGGERS = {"multiprocessing.api": logging.CRITICAL, "agent.server.api": logging.ERROR}


class Agent(LocalElasticAgent):
    """An agent whose ranks end as ``Ranks`` says."""

    ranks: ClassVar = Ranks({}, patience=0)  # There is one agent in a process.

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with hold_back():
            pids = super()._start_workers(worker_group)
            assert isinstance(self._pcontext, SubprocessContext)
            handlers = self._pcontext.subprocess_handlers
            processes = {worker.global_rank: handlers[worker.local_rank].proc for worker in worker_group.workers}
            Agent.ranks = Ranks(processes, self._shutdown_timeout)
            for number in STOP_SIGNALS:
                signal.signal(number, on_signal)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.ranks.check()
        if self.ranks.failure == 2:  # A mistake that the user has to correct: a restart would repeat it.
            self._remaining_restarts = 0
        return super()._monitor_workers(worker_group)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Wait as long as ``--shutdown-timeout`` says, and not 30 seconds whenever torchrun restarts the ranks."""
        if self.ranks.received:
            self.ranks.end(terminate=False)
        super()._shutdown(death_sig, self._shutdown_timeout)


def on_signal(number: int, _: FrameType | None) -> None:
    """Forward a stop signal; the first one ends torchrun, a later one must not interrupt its wait for the ranks."""
    is_first = not Agent.ranks.received
    Agent.ranks.forward(number)
    if is_first:
        raise SignalException(f"received signal {number}", signal.Signals(number))


def run_torchrun(argv: Sequence[str]) -> int:
    """Run torchrun with this agent, and return its exit code; it prints nothing that its ranks have printed."""
    if "LOGLEVEL" not in os.environ:
        for name, level in LOGGERS.items():
            logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(level)
    api.LocalElasticAgent = Agent  # type: ignore[misc]
    try:
        run.run(run.parse_args(argv))
    except SignalException as stop:
        return Agent.ranks.exit_code() or 128 + stop.sigval
    except ChildFailedError:
        return Agent.ranks.exit_code() or 1
    except (DistError, RendezvousError) as error:
        print(f"error: the rendezvous with the other machines failed: {first_line(error)}", file=sys.stderr)
        return 1  # A later attempt may succeed.
    return 0
