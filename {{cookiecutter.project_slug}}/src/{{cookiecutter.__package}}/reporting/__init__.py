"""What a run reports: metrics and progress while it trains, pictures at the end, where it came from, how fast it is.

It receives records, file names and a trainer to examine; it knows no model, no data and no strategy.
"""

from .examples import Examples, collect_examples, new_figure, write_examples
#:: if cookiecutter.__generates ::#
from .generate import continue_prompts, draw, generate
#:: endif ::#
from .metrics import append_record, set_aside
from .nonfinite import FiniteGuard, check_finite
from .pace import Pace, memory_in_use, reset_peak_memory
#:: if cookiecutter.__plays ::#
from .pictures import Film, draw_episode
#:: elif not cookiecutter.__generates ::#
from .pictures import draw_confusion, draw_images
#:: endif ::#
from .provenance import describe_run, write_provenance
from .tracker import Tracker
