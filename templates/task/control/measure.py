@torch.no_grad()
def measure(self) -> dict[str, np.ndarray]:
    """Return the metrics of this rank's episodes, and their ``index``."""
    collected: dict[str, list[Tensor]] = {}
    for indices, batch in zip(self.batches, self.loader, strict=True):
        seed_everything(int(indices[0]), self.parallel.device)
        numbers, _ = to_device(batch, self.parallel.device)
        measured = self.task.play(self.parallel.predict, numbers)
        for name, values in {"index": indices, **measured}.items():
            collected.setdefault(name, []).append(values)
    return self.to_numpy(collected)
