    def arrange_buckets(self) -> None:
        """Let DDP arrange its buckets now, by a backward of its own, and not after that of the first step.

        Their order decides how sums of gradients are rounded: the first step after a resume would differ from the same
        step of a run that was not interrupted.
        """
        forward = self.module.forward
        self.module.forward = lambda: sum(p.sum() for p in self.module.parameters() if p.requires_grad)
        self.ddp().backward()
        self.module.forward = forward
        self.module.zero_grad()
