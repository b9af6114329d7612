@torch.no_grad()
def measure(self) -> dict[str, np.ndarray]:
    """Return the metrics of this rank's episodes, and their ``index``."""
    collected: dict[str, list[Tensor]] = {}
    for number, batch in enumerate(self.loader):
        seed_everything(number, self.parallel.device)  # Whatever a loader has drawn.
        numbers, _ = to_device(batch, self.parallel.device)
        for name, values in self.task.play(self.parallel.predict, numbers).items():
            collected.setdefault(name, []).append(values)
    return self.to_numpy(collected)
