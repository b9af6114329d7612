def step(self, inputs: Any, targets: Any) -> None:
    """Let the policy act in the environments ``inputs``, given by number, and train it.

    A step has several updates, whose mean losses and norms are recorded.
    """
    parallel = self.parallel
    seed = derive_seed(self.config.run.seed, "step", self.steps, parallel.dp_rank)  # Of dropout.
    seed_everything(seed, self.process.device)
    batches = self.task.learn(parallel.predict, inputs, self.steps, self.process)
    updates = [self.update(*batch) for batch in batches]
    losses = {name: torch.stack([each[name] for each, _ in updates]).mean() for name in updates[0][0]}
    self.recent.append((losses, torch.stack([norm for _, norm in updates]).mean()))
    self.steps += 1

def update(self, inputs: Any, targets: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Update the weights with a local batch; returns the losses and the norm of the gradient, on the device."""
