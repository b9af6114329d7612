"""``doctor``: checks machines, interconnect and disk before a long run, and prints a table of the results.

It receives what the run needs (``Requirements``), and does not know the model, the data or the strategy.
"""

from .examine import examine
from .interconnect import measure_links, median_seconds
from .report import Requirements
