"""What a run reports: metrics and progress while it trains, curves at the end, where it came from, how fast it is.

It receives records, file names and a trainer to measure or examine; it knows no model, no data and no strategy.
"""

from .benchmark import benchmark
from .metrics import append_record
from .nonfinite import FiniteGuard, check_finite
from .pace import Pace
from .provenance import write_provenance
from .tracker import Tracker
