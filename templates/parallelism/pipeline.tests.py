# Number of ranks and settings: the splits that have to give the result of one process.
SPLITS = [(2, []), (4, ["--parallel.schedule", "ZBVZeroBubble", "--parallel.replicas", "2"])]
# And those whose evaluation has to.
EVALUATIONS = [(2, ["--parallel.schedule", "DualPipeV"]), (3, [])]
# The number of ranks where it does not matter.
RANKS = 2
