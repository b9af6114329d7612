def all_reduce_sum(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum each tensor over the ranks of ``group``, all of them at the same time; a collective."""
    for work in [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]:
        work.wait()
