#// A part of Parallel, which has module. //#
#// Uses Any, Optimizer, dsd. //#
def load_full_state_dict(self, model: Any, optimizer: Optimizer | None = None, state: Any = None) -> None:
    """Load rank 0's weights of the whole model, and the optimizer's state if given."""
    options = dsd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dsd.set_model_state_dict(self.module, model, options=options)
    options.strict = False  # A parameter that never had a gradient has no state.
    if optimizer and (own := dsd.get_optimizer_state_dict(self.module, optimizer))["state"]:  # Plain SGD has none.
        dsd.set_optimizer_state_dict(self.module, optimizer, {**own, "state": state or {}}, options=options)
