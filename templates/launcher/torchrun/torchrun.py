"""Run torchrun without its own messages, traceback and temporary folder.

The last lines of the log are then what the ranks print.
"""

import logging
import os
import signal
import sys
import tempfile

import torch.distributed.elastic.multiprocessing.api
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

logging.disable()
# Ranks would otherwise see the elements of a set in different orders.
os.environ.setdefault("PYTHONHASHSEED", "0")
# The warnings are about what a failed rank leaves, about pickling (on which loader.py gives better
# advice), and against train.exact.
HIDDEN_WARNINGS = "ignore:resource_tracker,ignore:Got pickle error,ignore:TensorFloat32"
os.environ.setdefault("PYTHONWARNINGS", HIDDEN_WARNINGS)


class FirstSignal(SignalException):
    """The stop signal that ends torchrun; another would interrupt it while the ranks save."""

    def __init__(self, message: str, sigval: signal.Signals) -> None:
        super().__init__(message, sigval)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)


# torchrun's handler raises what has this name.
torch.distributed.elastic.multiprocessing.api.SignalException = FirstSignal
with tempfile.TemporaryDirectory() as log_dir:
    try:
        run(parse_args([f"--log-dir={log_dir}", *sys.argv[1:]]))
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)
    except DistError as error:
        first_line = str(error).splitlines()[0]
        sys.exit(f"error: no rendezvous at HEAD and PORT: {first_line}")
    except ChildFailedError as error:
        failures = [(failure.exitcode, rank) for rank, failure in error.failures.items()]
        # A signal is the cause of other failures, and its exit code is negative.
        exit_code, rank = min(failures)
        if exit_code > 0:
            # The rank itself has printed why.
            sys.exit(exit_code)
        signal_name = signal.Signals(-exit_code).name
        sys.exit(f"error: rank {rank} was ended by {signal_name}")
