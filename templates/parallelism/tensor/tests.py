# Number of ranks and settings: splits that have to give the result of one process. The last one saves in shards.
#:: if cookiecutter.task == "language" ::#
LAYOUT = "--train.microbatches 2 --parallel.replicas 2 --parallel.sequence_parallel true".split()
SPLITS = [(2, []), (4, [*SHARDED, *LAYOUT])]
#:: else ::#
SPLITS = [(2, []), (4, [*SHARDED, "--train.microbatches", "2", "--parallel.replicas", "2"])]
#:: endif ::#
# The number of ranks for tests of something else.
RANKS = 2
