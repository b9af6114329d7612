# Number of ranks and settings: the splits that have to give the result of a plain loop. The last saves in shards.
SPLITS = [(1, []), (1, [*SHARDED, "--train.microbatches", "2"])]
# The number of ranks where it does not matter.
RANKS = 1
