# Number of ranks and settings: splits that have to give the result of one process. The last one saves in shards.
LAYOUT = "--train.microbatches 2 --parallel.replicas 2".split()
#:: if cookiecutter.task == "language" ::#
SPLITS = [
    (2, []),
    (4, LAYOUT),
    (4, [*SHARDED, *LAYOUT, "--parallel.shard_replicas", "true", "--parallel.sequence_parallel", "true"]),
]
#:: else ::#
SPLITS = [(2, []), (4, LAYOUT), (4, [*SHARDED, *LAYOUT, "--parallel.shard_replicas", "true"])]
#:: endif ::#
# The number of ranks for tests of something else.
RANKS = 2
