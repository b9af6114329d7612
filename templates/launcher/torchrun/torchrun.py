"""torchrun, with its arguments, whose last line and exit code are those of its ranks.

The program torchrun ends with 1 and a report of some 40 lines, also if a rank has already said in one line what a user
has to change (exit code 2), or if a signal has stopped the run.
"""

import signal
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> None:
    """Run torchrun with the arguments ``argv``; exits with the code of the rank that failed first."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Only now: PyTorch takes seconds to import, and Ctrl-C would end that with a traceback.
    from .agent import run_torchrun

    sys.exit(run_torchrun(argv))


if __name__ == "__main__":
    main(sys.argv[1:])
