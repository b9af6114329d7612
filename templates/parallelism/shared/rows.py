

def count_rows(length: int, shards: int, index: int) -> int:
    """Return how many of ``length`` rows a shard has: the last shards may have fewer, as those of ``torch.chunk``."""
    rows = -(-length // shards)
    return min(max(length - index * rows, 0), rows)
