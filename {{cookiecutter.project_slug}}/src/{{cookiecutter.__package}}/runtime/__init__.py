"""What a rank needs while it runs: its process group, random state, stop signals, failure reports, safe files.

It knows the process group's settings and what ``launch`` provides, and nothing about the model, the data or the loop.
"""

from .failures import record_collectives, report_failures
from .files import disk_errors, publish, remove, replace_text, write_atomically
from .memory import record_allocations
from .process_group import (
    Process,
    all_gather_numbers,
    all_gather_object,
    check_devices,
    choose_backend,
    choose_device,
    find_process,
    new_patient_group,
    on_main,
    process_group,
    rendezvous_arguments,
    set_timeout,
    timeout,
)
from .reproducibility import get_rng_state, seed_rank, set_exact_arithmetic, set_rng_state
from .stop_signal import Context, Stopped, StopSignal, exit_if
