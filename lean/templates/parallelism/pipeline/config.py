@dataclass
class ParallelConfig:
    """Pipeline parallelism: every rank holds consecutive blocks of the model, a stage or several."""

    replicas: int = 1
    """Pipelines that each hold the whole model and read a local batch; their number divides the ranks."""
    schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    """Order of a rank's forwards and backwards; the schedules are those of torch.distributed.pipelining."""
    stages_per_rank: int = 1
    """Stages on each rank: 1 for GPipe and 1F1B, 2 for ZBVZeroBubble and DualPipeV, any number for the others."""

    def dp_size(self, world_size: int) -> int:
        """Return the number of local batches that the global batch is split into: one per pipeline."""
        return self.replicas

    def check(self, config: "Config", world_size: int) -> None:
        """Reject ranks, stages and micro-batches that do not fit the schedule, and what it cannot run."""
        name, train = self.schedule, config.train
        if world_size % self.replicas:
            raise UserError(f"parallel.replicas is {self.replicas}, which does not divide {world_size} rank(s)")
        ranks = world_size // self.replicas
        wanted = {"GPipe": 1, "1F1B": 1, "ZBVZeroBubble": 2, "DualPipeV": 2}.get(name, self.stages_per_rank)
        if self.stages_per_rank != wanted:
            raise UserError(f"parallel.stages_per_rank is {self.stages_per_rank}; {name} needs {wanted}")
        needed = ranks * wanted if name in ("1F1B", "DualPipeV") else 1
        unit = max(1, train.microbatches // ranks) if name.startswith("Interleaved") else 1
        if train.microbatches < needed or train.microbatches % unit:
            fits = f"{needed} or more" if needed > 1 else f"a multiple of {ranks}"
            raise UserError(f"train.microbatches is {train.microbatches}; {name} on {ranks} rank(s) needs {fits}")
        if train.compile and name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
            raise UserError(f"train.compile does not work with {name}, which splits backward in two; turn it off")
        if train.precision == "fp16":
            raise UserError("train.precision is fp16, whose scaler would skip steps on some ranks alone; give bf16")
