"""Everything that happens before PyTorch is imported.

This room reads what the launcher says about this process, parses the command line, refuses what cannot work, and ties
the process to its launcher. It imports no PyTorch, which takes seconds: a mistake is reported at once.

It knows the settings (``config``), and nothing of the model, the data or the process group.
"""

from .arguments import Command, parse
from .debugger import check_debugger, collective_timeout, wait_for_debugger
from .environment import ProcessInfo, exit_with_error, find_process_info, is_first_on_machine, is_restart, read_nodes
from .parent import end_with_launcher, init_loader_worker
from .preflight import check_batch, check_layout, check_port, count_ranks
from .run_directory import acquire_run_directory, find_resume_candidates, list_checkpoints, lock
