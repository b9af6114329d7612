@torch.no_grad()
def measure(self) -> dict[str, np.ndarray]:
    """Return the metrics of this rank's episodes, and their ``index``."""
    collected: dict[str, list[Tensor]] = {}
    for batch in self.loader:
        numbers, _ = to_device(batch, self.parallel.device)
        for name, values in self.task.play(self.parallel.predict, numbers).items():
            collected.setdefault(name, []).append(values)
    indices = np.array(self.indices, dtype=np.int64)
    return {"index": indices} | {name: torch.cat(v)[: len(indices)].numpy() for name, v in collected.items()}
