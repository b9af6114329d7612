@torch.no_grad()
def measure(self) -> dict[str, np.ndarray]:
    """Return the metrics of this rank's episodes, and their ``index``."""
    collected: dict[str, list[Tensor]] = {}
    for number, batch in enumerate(self.loader):  # Loaders draw, too: so all is seeded anew.
        seed_everything(derive_seed(number, self.parallel.dp_rank), self.parallel.device)
        numbers, _ = to_device(batch, self.parallel.device)
        for name, values in self.task.play(self.parallel.predict, numbers).items():
            collected.setdefault(name, []).append(values)
    return self.to_numpy(collected)
