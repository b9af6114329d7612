def arrange_buckets(self) -> None:
    """Let DDP arrange its buckets now, by a backward of its own, and not after that of the first step.

    Their order decides how sums are rounded: otherwise, the first step after a resume would differ.
    """
    forward = self.module.forward
    self.module.forward = lambda: sum(p.sum().to(self.device) for p in self.module.parameters() if p.requires_grad)
    self.ddp().backward()
    self.module.forward = forward
    self.module.zero_grad()
