"""``plan``: simulates a training step of any number of ranks in one process, before any machine is rented.

    fakes            a process group that sends nothing, and tensors without values
    layout           what a simulation has to know of the strategy, beside what ``traits`` says of any
    simulate         the project's own strategy and step as one rank; a ``Ledger`` records memory, messages, operations
    roles            ranks that do the same are simulated once
    estimate         how long a step takes, from the speed of devices and links
    remedies         settings that fit, if these do not
    report           the table and the JSON

It receives the module ``train.py``, the settings and the options (``Project``), and knows no model and no data.
"""

from .report import plan
from .roles import simulate_all
from .simulate import Project
