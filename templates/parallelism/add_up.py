def add_up(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Sum each tensor over the ranks of ``group``, all under way at once; a collective."""
    for work in [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]:
        work.wait()
