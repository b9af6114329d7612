RANKS = 2
SPLITS: list[tuple[int, list[str]]] = [(1, []), (2, ["--data.num_workers", "2"]), (4, [])]
EVALUATES_ON = [1, 2, 3]
MORE_RANKS = 4
