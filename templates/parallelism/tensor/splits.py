RANKS = 2
SPLITS = [
    (2, []),
    (4, ["--parallel.tensor", "2"]),
    (4, ["--parallel.replicas", "2"]),
]
EVALUATES_ON = [1, 2, 4]
MORE_RANKS = 4
