# Number of ranks and settings: the splits that have to give the result of a plain loop; there is one process.
SPLITS = [(1, []), (1, ["--train.microbatches", "2"])]
# One more for `evaluate`, which reads a checkpoint of another.
EVALUATION: tuple[int, list[str]] = (1, [])
# The number of ranks where it does not matter.
RANKS = 1
