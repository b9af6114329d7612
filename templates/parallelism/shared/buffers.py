#// A part of Parallel, which has dp_group, module. //#
#// Uses dist. //#
def average_buffers(self) -> None:
    """Average BatchNorm's running statistics over ranks with other samples."""
    for name, statistics in self.module.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            dist.all_reduce(statistics, dist.ReduceOp.AVG, group=self.dp_group)
