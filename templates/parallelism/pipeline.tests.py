# Number of ranks and settings: the splits that have to give the result of one process. The last saves in shards.
SPLITS = [(2, []), (4, [*SHARDED, "--parallel.schedule", "ZBVZeroBubble", "--parallel.replicas", "2"])]
# The number of ranks where it does not matter.
RANKS = 2
