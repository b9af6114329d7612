# Number of ranks and settings: the splits that have to give the result of one process.
#:: if cookiecutter.task == "language" ::#
SPLITS = [(2, []), (4, "--train.microbatches 2 --parallel.replicas 2 --parallel.sequence_parallel true".split())]
#:: else ::#
SPLITS = [(2, []), (4, ["--train.microbatches", "2", "--parallel.replicas", "2"])]
#:: endif ::#
# One more for `evaluate`, which reads a checkpoint of another.
EVALUATION: tuple[int, list[str]] = (3, ["--parallel.replicas", "3"])
# The number of ranks where it does not matter.
RANKS = 2
