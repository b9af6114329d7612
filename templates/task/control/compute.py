def compute(model: nn.Module, samples: Any, indices: range) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the losses and the weight of a batch, and what happened in each of its environments and episodes."""
    dataset, numbers, config = module("dataset"), [samples[i][0] for i in indices], settings()
    task = module("task").Task(config, torch.device("cpu"))
    experience = dataset.collect(model, numbers, 0, config)
    observations, targets = next(dataset.minibatches(experience, 0, config))
    outputs = 2 * model(observations)  # Another policy than the one that acted.
    sums = {**task.losses(outputs, targets), "weight": torch.tensor(float(task.weight(targets)))}
    return sums, experience | task.play(model, torch.tensor(numbers))
