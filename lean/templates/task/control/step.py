    def step(self, inputs: Any, targets: Any) -> None:
        """Let the policy act in environments, whose numbers are ``inputs``, and train it with what happened.

        That takes several updates of the weights; the record of the step has the means of their losses and norms.
        """
        progress = self.progress
        seed = derive_seed(self.config.run.seed, "step", progress.step, self.parallel.dp_rank)  # Of dropout, for example.
        seed_everything(seed, self.process.device)
        batches = self.task.experience(self.parallel.predict, inputs, progress.step, self.process)
        updates = [self.update(*batch) for batch in batches]
        losses = {name: torch.stack([each[name] for each, _ in updates]).mean() for name in updates[0][0]}
        self.recent.append((losses, torch.stack([norm for _, norm in updates]).mean()))
        progress.step, progress.epoch = progress.step + 1, progress.epoch + 1
