class Evaluator:
    """Evaluates a model on a map-style dataset each time it is called; rejects a stream, whose samples have no index.

    ``guard`` returns a context manager for each batch, entered equally often on every rank; it may raise to stop. The
    samples are loaded by the processes of ``beside``, the loader of training. ``metrics`` are the per-sample metrics of
    the last evaluation, in the order of the dataset; empty before the first.
    """

    def __init__(
        self,
        samples: Any,
        parallel: Strategy,
        config: DataConfig,
        seed: int,
        guard: Context = nullcontext,
        beside: Any = None,
    ) -> None:
        if isinstance(samples, IterableDataset):
            raise UserError("the test set is an IterableDataset; give a list of its samples, so that each counts once")
        self.samples, self.parallel, self.guard = seed_dataset(samples, dataset.collate_fn, seed), parallel, guard
        self.metrics: Metrics = {}
        if not len(samples):
            raise UserError("the test set is empty; give it a sample")
        self.sampler = EvalSampler(len(samples), parallel.dp_rank, parallel.dp_size, config.eval_batch_size)
        batch_size, device = self.sampler.batch_size, parallel.device
        self.loader = build_loader(self.samples, self.sampler, batch_size, config, device, beside)

    def __call__(self) -> dict[str, Any]:
        """Return ``num_samples`` and ``dataset.aggregate_metrics``, the same on every rank; a collective."""
        self.parallel.average_buffers()
        self.parallel.module.eval()
        own = self.evaluate_share()
        self.parallel.module.train()
        # One message of a few arrays per rank; samples are put in order by their index.
        self.metrics = merge(all_gather_object(own), len(self.samples))
        return {"num_samples": len(self.samples), **dataset.aggregate_metrics(self.metrics)}

    @torch.no_grad()
    def evaluate_share(self) -> Metrics:
        """Return the metrics of the samples whose outputs this rank has, and their ``index``."""
        collected: dict[str, list[Tensor]] = {}
        device, left = self.parallel.device, len(self.sampler.indices)
        for batch in self.loader:
            with self.guard():
                inputs, targets = unpack(batch)
                outputs = self.parallel.predict(to_device(inputs, device))
                if outputs is not None:
                    for name, values in dataset.per_sample_metrics(outputs, to_device(targets, device)).items():
                        collected.setdefault(name, []).append(values[:left])
            left = max(0, left - self.sampler.batch_size)
        index = np.array(self.sampler.indices if collected else [], dtype=np.int64)
        arrays = {name: concatenate(name, values, len(index)) for name, values in collected.items()}
        return {"index": index} | arrays
