# Number of ranks and settings: the splits that have to give the result of one process.
SPLITS = [(2, []), (4, ["--parallel.schedule", "ZBVZeroBubble", "--parallel.replicas", "2"])]
# One more for `evaluate`, which reads a checkpoint of another.
EVALUATION: tuple[int, list[str]] = (3, [])
# The number of ranks where it does not matter.
RANKS = 2
