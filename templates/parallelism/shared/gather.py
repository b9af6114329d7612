def full_state_dict(self, optimizer: Optimizer) -> tuple[Any, Any]:
    """Return the weights of the whole model, and the optimizer's state of each parameter, on rank 0's CPU."""
    options = dsd.StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optim = dsd.get_state_dict(self.module, optimizer, options=options)
    return model, optim.get("state", {})  # On other ranks, there is none.
