@dataclass
class ParallelConfig:
    """Pipeline parallelism: every rank holds consecutive blocks of the model, a stage or several."""

    pipeline: int = 0
    """Ranks of a pipeline, which read the same samples; 0: all ranks of a replica."""
    replicas: int = 1
    """Copies of the model, each sharded over an equal number of ranks: several machines may each hold one."""
    schedule: Literal["GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B"] = "1F1B"
    """Order of a rank's forwards and backwards; the schedules are those of torch.distributed.pipelining."""

    @property
    def stages_per_rank(self) -> int:
        """Return the number of stages on each rank: two halve the time that ranks wait."""
        return 1 if self.schedule in ("GPipe", "1F1B") else 2

    def dp_size(self, world_size: int) -> int:
        """Return the number of local batches that the global batch is split into: one per pipeline."""
        return world_size // self.pipeline if self.pipeline else self.replicas

    def check(self, config: "Config", world_size: int) -> None:
        """Reject ranks, stages and micro-batches that do not fit the schedule, and what it cannot run."""
        name, train = self.schedule, config.train
        if world_size % (max(1, self.pipeline) * self.replicas):
            product = f"parallel.pipeline x parallel.replicas is {max(1, self.pipeline)} x {self.replicas}"
            raise UserError(f"{product}, which does not divide {world_size} rank(s)")
        ranks = world_size // self.dp_size(world_size)
        rest = train.microbatches % max(1, train.microbatches // ranks) if name == "Interleaved1F1B" else 0
        if rest or (name == "1F1B" and train.microbatches < ranks):
            raise UserError(f"train.microbatches is {train.microbatches}; {name} takes any multiple of {ranks}")
        if train.allow_unused and ranks < world_size:
            raise UserError("train.allow_unused does not work with several pipelines; set parallel.pipeline to 0")
        if train.precision == "fp16":
            raise UserError("train.precision is fp16, whose scaler would skip steps on some ranks alone; give bf16")
