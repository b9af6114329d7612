LAYOUT = ["--parallel.pipeline", "2", "--parallel.schedule"]
SPLITS: list[tuple[int, list[str]]] = [
    (1, ["--parallel.schedule", "GPipe"]),
    (2, ["--data.num_workers", "2"]),
    (4, [*LAYOUT, "1F1B"]),
    (4, [*LAYOUT, "Interleaved1F1B", "--parallel.replicas", "2"]),
]
RANKS = 2
EVALUATES_ON = [1, 2, 3]
MORE_RANKS = 4
