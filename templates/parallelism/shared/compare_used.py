#// A part of Parallel, which has module, process. //#
#// Uses UserError. //#
def compare_used(self) -> None:
    """Reject parameters with a gradient on some ranks only: FSDP would have added those of others to it."""
    used = self.process.all_gather({name for name, p in self.module.named_parameters() if p.grad is not None})
    if names := set.union(*used) - set.intersection(*used):
        raise UserError(f"only some ranks use {min(names)}; under this strategy, all have to, or none")
