def average_buffers(self) -> None:
    """Average BatchNorm's running statistics over ranks that have seen other samples."""
    layers = [layer for layer in self.module.modules() if isinstance(layer, BATCH_NORMS)]
    for statistics in [each for layer in layers for each in (layer.running_mean, layer.running_var)]:
        if statistics is not None:
            dist.all_reduce(statistics, group=self.dp_group)
            statistics /= self.dp_size
