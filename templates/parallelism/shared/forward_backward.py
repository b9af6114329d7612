#// Uses Any, Callable, Tensor, loss_parallel. //#
#:: if fact("plans_layers") ::#
@loss_parallel()  # Sharded logits.
#:: endif ::#
def forward_backward(self, inputs: Any, targets: Any, mean_loss: Callable[[Any, Any], Tensor]) -> None:
    """Leave in each parameter the gradient of the mean loss over all micro-batches; a collective."""
