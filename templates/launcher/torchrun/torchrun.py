"""torchrun, whose log ends with what the ranks print: without its own messages, traceback and temporary folder."""

import logging
import os
import signal
import sys
import tempfile

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

logging.disable()
os.environ.setdefault("PYTHONHASHSEED", "0")  # Ranks see sets in the same order.
# Hide what a failed rank leaves, PyTorch's hint on pickling, which loader.py gives, and one against train.exact.
os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker,ignore:Got pickle error,ignore:TensorFloat32")
with tempfile.TemporaryDirectory() as folder:
    try:
        run(parse_args([f"--log-dir={folder}", *sys.argv[1:]]))
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)
    except DistError as error:
        sys.exit(f"error: no rendezvous at HEAD and PORT: {str(error).splitlines()[0]}")
    except ChildFailedError as error:
        code, rank = min((failure.exitcode, rank) for rank, failure in error.failures.items())
        if code > 0:  # The rank has printed why.
            sys.exit(code)
        sys.exit(f"error: rank {rank} was ended by {signal.Signals(-code).name}")
