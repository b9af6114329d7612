# Number of processes and settings: they have to give the result of a plain loop. The last one saves in shards.
SPLITS = [(1, []), (1, [*SHARDED, "--train.microbatches", "2"])]
# The number of processes.
RANKS = 1
