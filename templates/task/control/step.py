def train_step(self, inputs: Any, targets: Any) -> dict[str, Any]:
    """Let the policy act in the environments whose numbers are ``inputs``, and train it.

    Returns:
        The losses and the gradient norm, averaged over the updates of this step, on the device.
    """
    # Dropout draws other numbers in each step and local batch, and the same after a resume.
    step_seed = derive_seed(self.config.run.seed, "step", self.step, self.parallel.dp_rank)
    seed_everything(step_seed, self.process.device)
    updates = []
    batches = self.task.learn(self.parallel.predict, inputs, self.step, self.process)
    for observations, experience in batches:
        updates.append(self.update(observations, experience))
    means = {}
    for name in updates[0]:
        means[name] = torch.stack([update[name] for update in updates]).mean()
    return means
