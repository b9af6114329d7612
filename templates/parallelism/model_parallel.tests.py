# Number of ranks and settings: the splits that have to give the result of one process.
SPLITS = [(2, []), (4, ["--train.microbatches", "2", "--parallel.devices", "3"])]
# And those whose evaluation has to.
EVALUATIONS = [(2, []), (3, [])]
# The number of ranks where it does not matter.
RANKS = 2
