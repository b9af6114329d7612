# Number of ranks and settings: the splits that have to give the result of one process. The last saves in shards.
SPLITS = [(2, []), (4, [*SHARDED, "--train.microbatches", "2", "--parallel.devices", "3"])]
# The number of ranks where it does not matter.
RANKS = 2
