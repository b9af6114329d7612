def balance(weights: Sequence[int], parts: int) -> list[int]:
    """Cut a row of blocks into ``parts`` runs, the heaviest of which is as light as can be.

    Args:
        weights: The weight of each block.
        parts: Number of runs, at most that of the blocks.

    Returns:
        The number of blocks in each run, 1 or more.
    """

    @cache
    def best(start: int, parts: int) -> tuple[int, int, list[int]]:
        """The heaviest run, the sum of squares (so that the others are even too), and the lengths from ``start`` on."""
        if parts == 1:
            total = sum(weights[start:])
            return total, total**2, [len(weights) - start]
        options = []
        for end in range(start + 1, len(weights) - parts + 2):
            first, (heaviest, squares, lengths) = sum(weights[start:end]), best(end, parts - 1)
            options.append((max(first, heaviest), first**2 + squares, [end - start, *lengths]))
        return min(options)

    return best(0, parts)[2]
