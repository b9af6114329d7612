    def full_state_dict(self, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the weights of the whole model, and the optimizer's state of each parameter, on rank 0's CPU."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optim = get_state_dict(self.module, optimizer, options=options)
        return model, optim.get("state", {})

    def load_full_state_dict(self, model: Any, optimizer: torch.optim.Optimizer | None = None, state: Any = None) -> None:
        """Load rank 0's weights of the whole model, and the state of the optimizer if there is one."""
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(self.module, model, options=options)
        if optimizer:
            groups = get_optimizer_state_dict(self.module, optimizer)["param_groups"]  # Those of the settings.
            whole = {"state": state or {}, "param_groups": groups}
            set_optimizer_state_dict(self.module, optimizer, whole, options=options)
