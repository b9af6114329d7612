def step(self, inputs: Any, targets: Any) -> None:
    """Let the policy act in the environments ``inputs``, given by number, and train it.

    A step has several updates, whose mean losses and norms are recorded.
    """
    parallel = self.parallel
    seed = derive_seed(self.config.run.seed, "step", self.steps, parallel.dp_rank)  # Of dropout.
    seed_everything(seed, self.process.device)
    batches = self.task.learn(parallel.predict, inputs, self.steps, self.process)
    updates = [self.update(*batch) for batch in batches]
    self.recent.append({name: torch.stack([each[name] for each in updates]).mean() for name in updates[0]})
    self.steps += 1
