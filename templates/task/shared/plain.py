def batches(train_set: Any, config: Any) -> Iterator[Any]:
    """Yield global batches: an epoch is one permutation of the samples, without the incomplete batch at its end."""
    seed, size = config.run.seed, config.data.global_batch_size
    for epoch in count():
        if isinstance(train_set, IterableDataset):
            yield from stream(train_set, seed, epoch, size)
            continue
        for start in range(0, len(train_set) - size + 1, size):
            indices = [permuted(x, len(train_set), seed, epoch) for x in range(start, start + size)]
            yield dataset.collate_fn(read(train_set, seed, epoch, indices))


def permuted(x: int, length: int, seed: int, epoch: int) -> int:
    """Return which sample is the ``x``-th of an epoch; ``splitting/order.py`` has the rule in words."""
    keys = struct.unpack("<8Q", blake2b(repr((seed, epoch)).encode()).digest())
    a = math.ceil(math.sqrt(length))
    b = math.ceil(length / a)
    while True:
        right, left = divmod(x, a)
        for key, modulus in zip(keys, 4 * (a, b), strict=True):
            mixed = (right + key) % 2**64
            for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
                mixed = (mixed ^ mixed >> shift) * factor % 2**64
            left, right = right, (left + mixed) % modulus
        x = left + a * right
        if x < length:
            return x


def read(samples: Any, seed: int, epoch: int, indices: Sequence[int]) -> list[Any]:
    """Return samples, each drawn with random numbers that are seeded with (seed, epoch, index)."""
    return [(seed_everything(seed, epoch, index), samples[index])[1] for index in indices]


def stream(samples: Any, seed: int, epoch: int, size: int) -> Iterator[Any]:
    """Yield the global batches of an epoch of a stream."""
    if hasattr(samples, "set_epoch"):
        samples.set_epoch(epoch)
    seed_everything(seed, epoch, 0)
    source, batch = iter(samples), []
    for number in count():
        seed_everything(seed, epoch, 0, number)
        if (sample := next(source, None)) is None:
            return
        batch.append(sample)
        if len(batch) == size:
            yield dataset.collate_fn(batch)
            batch = []


def seed_everything(*key: int) -> None:
    """Seed ``random``, NumPy and PyTorch with a hash of a sample's key."""
    digest = int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest())
    random.seed(digest)
    np.random.seed(digest % 2**32)
    torch.manual_seed(digest)
