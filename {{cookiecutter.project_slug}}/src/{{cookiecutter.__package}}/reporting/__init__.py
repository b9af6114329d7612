"""What a run reports: metrics and progress while it trains, curves at the end, where it came from, how fast it is.

It receives records, file names and a trainer to measure, and does not know the model, the data or the strategy.
"""

from .benchmark import benchmark
from .metrics import Throughput, append_record
from .provenance import write_provenance
from .tracker import Tracker
