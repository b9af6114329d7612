"""What happens before PyTorch is imported, which takes seconds: a mistake is reported immediately.

This room reads the launcher's variables, parses the command line, rejects what cannot work, locks the run directory,
and ties the process to its launcher. Importing it does not import PyTorch.

It knows the settings (``config``), and nothing about the model, the data or the process group.
"""

from .amounts import PLAN_OPTIONS, PlanOptions, read_plan_options
from .arguments import Command, Option, parse
from .debugger import check_debugger, collective_timeout, wait_for_debugger
from .ending import run_and_exit
from .environment import (
    ProcessInfo,
    exit_with_error,
    find_process_info,
    first_line,
    is_first_on_machine,
    is_port,
    is_restart,
    print_error,
    read_nodes,
)
from .loader import LoaderContext, init_loader_worker
from .parent import end_with_launcher
from .preflight import check_batch, check_layout, check_port, count_ranks
from .run_directory import (
    acquire_run_directory,
    check_run_directory,
    find_resume_candidates,
    list_checkpoints,
    lock,
)
from .signals import STOP_SIGNALS
#:: if cookiecutter.__plays ::#
from .spaces import check_spaces, make_environment, take_environment
#:: endif ::#
from .values import check_values
