#// A part of Parallel, which has device, module. //#
#// Uses DistributedDataParallel, nn. //#
def build_ddp(self, find_unused: bool) -> DistributedDataParallel:
    """Wrap the module in DDP, and let a first backward order its gradients, which decides how sums are rounded."""
    ddp = DistributedDataParallel(self.module, find_unused_parameters=find_unused, gradient_as_bucket_view=True)
    ddp.broadcast_buffers = False  # average_buffers does that before they are used.
    ddp.module = nn.Module()  # In its place, whose hooks expect inputs.
    ddp.module.forward = lambda: sum(p.sum().to(self.device) for p in self.module.parameters() if p.requires_grad)
    ddp().backward()  # Otherwise, the order would change after the first step of every start.
    ddp.module = self.module
    self.module.zero_grad()
    return ddp
