"""What a run reports: metrics and progress while it trains, pictures at the end, where it came from, how fast it is.

It receives records, file names and a trainer to measure or examine; it knows no model, no data and no strategy.
"""

from .benchmark import benchmark
#:: if cookiecutter.__has_stages ::#
from .bubble import expected_bubble
#:: endif ::#
from .examples import Examples, collect_examples, write_examples
#:: if cookiecutter.__generates ::#
from .generate import continue_prompts, draw, generate
#:: endif ::#
from .metrics import append_record
from .nonfinite import FiniteGuard, check_finite
from .pace import Pace
#:: if cookiecutter.__plays ::#
from .pictures import Film, draw_episode
#:: elif not cookiecutter.__generates ::#
from .pictures import draw_confusion, draw_images
#:: endif ::#
from .provenance import write_provenance
from .tracker import Tracker
