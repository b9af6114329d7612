#// Uses Any, NUMBER, Tensor, nn, torch. //#
class Stage(nn.Module):
    """Consecutive blocks, as a schedule runs them: with one tensor between two stages."""

    def __init__(self, blocks: nn.Sequential, is_last: bool) -> None:
        super().__init__()
        self.blocks, self.is_last = blocks, is_last
        self.inputs: list[Any] = []  # Of all micro-batches, in the first stage, which gets numbers.
        self.outputs: Any = None  # Of the last micro-batch, in the last stage.

    def forward(self, x: Any) -> Tensor:
        if self.inputs:
            x = self.inputs.pop(0)  # They come in order.
        elif torch.is_grad_enabled():
            x = x.view_as(x)
            x.register_hook(Tensor.contiguous)  # Only such gradients can be sent.
        x = self.blocks(x)
        if self.is_last:
            self.outputs, x = x, torch.zeros_like(NUMBER, device="cpu")  # For the loss.
        return x.contiguous()
