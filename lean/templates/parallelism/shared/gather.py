    def average_buffers(self) -> None:
        """Average BatchNorm's running statistics over the ranks of ``dp_group``, which have seen other samples."""
        layers = [layer for layer in self.module.modules() if isinstance(layer, BATCH_NORMS)]
        for statistics in [each for layer in layers for each in (layer.running_mean, layer.running_var)]:
            if statistics is not None:
                dist.all_reduce(statistics, group=self.dp_group)
                statistics /= self.dp_size

    def full_state_dict(self, optimizer: Optimizer) -> tuple[Any, Any]:
        """Return the weights of the whole model, and the optimizer's state of each parameter, on rank 0's CPU."""
        options = dsd.StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optim = dsd.get_state_dict(self.module, optimizer, options=options)
        return model, optim.get("state", {})  # On other ranks, there is none.
