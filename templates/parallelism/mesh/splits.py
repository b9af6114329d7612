RANKS = 2
SPLITS: list[tuple[int, list[str]]] = [
    (1, []),
    (4, ["--parallel.pipeline", "2", "--parallel.tensor", "2"]),
    (4, ["--parallel.pipeline", "2", "--data.micro_batch_size", "64"]),
    (4, ["--parallel.tensor", "2", "--parallel.replicas", "2"]),
]
EVALUATES_ON = [1, 2, 3]
MORE_RANKS = 4
