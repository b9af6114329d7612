def compute(model: nn.Module, samples: Any, indices: range) -> tuple[Any, Any]:
    """Return the losses and the weight of a batch, and what each environment and episode gave."""
    config = settings()
    config.data.micro_batch_size = None  # One micro-batch has all environments.
    dataset = module("dataset")
    task = module("task").Task(config, torch.device("cpu"))
    numbers = [samples[index][0] for index in indices]
    experience = dataset.collect(model, numbers, 0, config)
    ((observations, targets),) = next(dataset.minibatches(experience, 0, config))
    # Doubled outputs are those of another policy than the one that has acted.
    losses = task.losses(2 * model(observations), targets)
    weight = torch.tensor(float(task.weight(targets)))
    episodes = task.play(model, torch.tensor(numbers))
    return losses | {"weight": weight}, experience | episodes
