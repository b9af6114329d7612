#// A part of Parallel, which has module. //#
#// Uses Any, Optimizer, dsd. //#
def full_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
    """Return the whole model's weights, and the optimizer's state by parameter, on rank 0's CPU."""
    options = dsd.StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optim = dsd.get_state_dict(self.module, optimizer, options=options)
    return {"model": model, "optimizer": {"state": optim.get("state", {})}}  # On other ranks, there is none.
