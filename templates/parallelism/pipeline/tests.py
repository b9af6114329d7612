# Number of ranks and settings: splits that have to give the result of one process. The last one saves in shards.
LAYOUT = ("--parallel.replicas", "2", "--parallel.schedule")
SPLITS = [
    (2, []),
    (4, [*LAYOUT, "1F1B"]),
    (4, [*SHARDED, *LAYOUT, "ZBVZeroBubble", "--parallel.shard_replicas", "true"]),
]
# The number of ranks for tests of something else.
RANKS = 2
