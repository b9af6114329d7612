# Number of ranks and settings: the splits that have to give the result of one process. The last saves in shards.
#:: if cookiecutter.task == "language" ::#
LAYOUT = "--train.microbatches 2 --parallel.replicas 2 --parallel.sequence_parallel true".split()
SPLITS = [(2, []), (4, [*SHARDED, *LAYOUT])]
#:: else ::#
SPLITS = [(2, []), (4, [*SHARDED, "--train.microbatches", "2", "--parallel.replicas", "2"])]
#:: endif ::#
# The number of ranks where it does not matter.
RANKS = 2
