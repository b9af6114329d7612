"""``benchmark``: measures where the time of a training step goes, what ranks send each other, and what a save costs.

steps          the parts of a step, one after another
exposed        how much of them the ranks spend in waiting for each other, from a trace
flops          floating-point operations of a step, as a share of what the device can do
collectives    an all-reduce, and a parameter server
saving         how long a save takes, and how long training stands still

It receives a trainer to measure, and knows no model, no data and no strategy.
"""

#:: if cookiecutter.__has_stages ::#
from .bubble import expected_bubble
#:: endif ::#
from .measure import benchmark
