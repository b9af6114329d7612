# Number of ranks and settings: splits that have to give the result of one process. The last one saves in shards.
SPLITS = [(2, []), (4, [*SHARDED, "--train.microbatches", "2", "--parallel.devices", "3"])]
# The number of ranks for tests of something else.
RANKS = 2
