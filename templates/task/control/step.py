def train_step(self, batch: Iterable[Any]) -> StepLosses:
    """Let the policy act in the environments whose numbers are in a batch, and train it."""
    numbers = torch.cat([to_device(part, self.process.device)[0] for part in batch])
    step_seed = derive_seed(self.config.run.seed, "act", self.step, self.parallel.dp_rank)
    seed_everything(step_seed, self.process.device)
    updates = self.task.learn(self.parallel.predict, numbers, self.step, self.process)
    parts: StepLosses = []
    for number, microbatches in enumerate(updates):
        parts += self.update(microbatches, f"update {number}")
    return parts
