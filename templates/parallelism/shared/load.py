def load_full_state_dict(self, model: Any, optimizer: Optimizer | None = None, state: Any = None) -> None:
    """Load rank 0's weights of the whole model, and the optimizer's state if given."""
    options = dsd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dsd.set_model_state_dict(self.module, model, options=options)
    if optimizer:
        groups = dsd.get_optimizer_state_dict(self.module, optimizer)["param_groups"]
        whole = {"state": state or {}, "param_groups": groups}
        dsd.set_optimizer_state_dict(self.module, optimizer, whole, options=options)
