def forward_backward(self, inputs: Any, targets: Any, weight: int | Tensor) -> dict[str, Tensor]:
    """Leave in each parameter the gradient of the mean loss over the global batch; a collective.

    Losses are divided by ``weight``; those returned sum up over the ranks to ``dp_size`` times the mean.
    """
