def forward_backward(self, inputs: Any, targets: Any, weight: int | Tensor) -> dict[str, Tensor]:
    """Leave in each parameter the gradient of the mean loss over the global batch; a collective.

    ``weight`` is what the losses of a local batch are divided by, on average over the ranks. Returns the losses by
    name: detached scalars on the device, whose sum over the ranks is the mean over the global batch.
    """
