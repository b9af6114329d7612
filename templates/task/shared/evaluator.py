class Evaluator:
    """Evaluates a model on a map-style dataset each time it is called; rejects a stream, whose samples have no index.

    ``guard`` returns a context manager for each batch, entered equally often on every rank; it may raise to stop.
    """

    def __init__(
        self, samples: Any, parallel: Strategy, config: DataConfig, seed: int, guard: Context = nullcontext
    ) -> None:
        if isinstance(samples, IterableDataset):
            raise UserError("the test set is an IterableDataset; give a list of its samples, so that each counts once")
        self.samples, self.parallel, self.guard = seed_dataset(samples, seed), parallel, guard
        self.sampler = EvalSampler(len(samples), parallel.dp_rank, parallel.dp_size)
        self.loader = build_loader(self.samples, self.sampler, config.eval_batch_size, config, parallel.device)
        # Rank 0 has at least as many samples as any other rank.
        self.most_batches = math.ceil(math.ceil(len(samples) / parallel.dp_size) / config.eval_batch_size)

    def __call__(self) -> dict[str, Any]:
        """Return ``num_samples`` and ``dataset.aggregate_metrics``, the same on every rank; a collective."""
        self.parallel.average_buffers()
        self.parallel.module.eval()
        own = self.evaluate_share()
        self.parallel.module.train()
        # One message of a few arrays per rank; samples are put in order by their index.
        metrics = merge(all_gather_object(own), len(self.samples))
        return {"num_samples": len(self.samples), **dataset.aggregate_metrics(metrics)}

    @torch.no_grad()
    def evaluate_share(self) -> Metrics:
        """Return the metrics of the samples whose outputs this rank has, and their ``index``."""
        collected: dict[str, list[Tensor]] = {}
        device = self.parallel.device
        for batch, counts in self.batches():
            with self.guard():
                inputs, targets = unpack(batch)
                outputs = self.parallel.predict(to_device(inputs, device))
                if outputs is None or not counts:
                    continue
                for name, values in dataset.per_sample_metrics(outputs, to_device(targets, device)).items():
                    collected.setdefault(name, []).append(values)
        arrays = {name: concatenate(name, values) for name, values in collected.items()}
        return {**arrays, "index": np.array(self.sampler.indices if arrays else [], dtype=np.int64)}

    def batches(self) -> Iterator[tuple[Any, bool]]:
        """Yield this rank's batches, then dummy batches that do not count, up to rank 0's number of batches.

        A rank without samples still runs the model, so that the model's collectives match.
        """
        yield from ((batch, True) for batch in self.loader)
        for _ in range(self.most_batches - len(self.loader)):
            yield self.samples.__getitems__([(0, 0)]), False


def concatenate(name: str, values: list[Tensor]) -> np.ndarray:
    """Return the values of one metric as one array; reject rows whose shape differs between batches."""
    if len({value.shape[1:] for value in values}) > 1:
        raise UserError(f"per_sample_metrics returned a {name} whose rows differ in shape; return a number for each")
    return torch.cat(values).cpu().numpy()
