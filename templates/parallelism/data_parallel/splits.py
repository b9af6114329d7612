RANKS = 1
SPLITS: list[tuple[int, list[str]]] = [
    (1, []),
    (1, ["--data.micro_batch_size", "64", "--data.num_workers", "2"]),
]
EVALUATES_ON = [1]
MORE_RANKS = 1
