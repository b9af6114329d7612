#// A part of Parallel, which has dp_group, module, outline, process. //#
#// Uses Any, DTensor, Optimizer, Tensor, dist, dsd, tree_map_only. //#
def full_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
    """Return the whole model's weights, and the optimizer's state by parameter, on rank 0's CPU."""
    rank, group, size = self.process.rank, self.process.cpu_group, dist.get_world_size(self.dp_group)
    model, optim = dsd.get_state_dict(self.module, optimizer)

    def gather(part: Tensor) -> Tensor | None:
        whole = part.full_tensor() if isinstance(part, DTensor) else part
        return whole.cpu() if rank % size == 0 else None

    whole: list[Any] = tree_map_only(Tensor, gather, [model, optim["state"]])
    for source in range(size, self.process.world_size, size):
        part = [*whole]
        if rank == source:
            dist.send_object_list(part, 0, group)
        elif rank == 0:
            dist.recv_object_list(part, source, group)
            whole = [mine | theirs for mine, theirs in zip(whole, part, strict=True)]
    return {"model": whole[0], "optimizer": {"state": whole[1]}}

def load_full_state_dict(self, model: Any, optimizer: Optimizer | None = None, state: Any = None) -> None:
    """Load rank 0's weights of the whole model, and the optimizer's state if given."""
    own, states, names = dict[str, Any](), dict[str, Any](), self.module.state_dict()
    for name in max(self.process.all_gather([*model])):  # Rank 0's.
        entry = [model.get(name), (state or {}).get(name)]
        dist.broadcast_object_list(entry, 0, self.process.cpu_group)
        if name in names or name not in self.outline.names:
            own[name], states[name] = entry
    options = dsd.StateDictOptions(full_state_dict=True)
    dsd.set_model_state_dict(self.module, own, options=options)
    options.strict = False  # Without a gradient, there is no state.
    if optimizer and any(states.values()):
        whole = dsd.get_optimizer_state_dict(self.module, optimizer)
        whole["state"] = {name: values for name, values in states.items() if values}
        dsd.set_optimizer_state_dict(self.module, optimizer, whole, options=options)
