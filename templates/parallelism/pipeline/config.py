@dataclass
class ParallelConfig:
    """Pipeline parallelism: every rank holds one or two stages of consecutive blocks."""

    pipeline: int = 0
    """Number of ranks of a pipeline, which read the same samples; 0: all ranks of a replica."""
    replicas: PositiveInt = 1
    """Number of copies of the model, say one per machine, each sharded over equally many ranks."""
    schedule: Literal["GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B"] = "1F1B"
    """Order of a rank's forward and backward passes: a schedule of torch.distributed.pipelining."""

    @property
    def stages_per_rank(self) -> int:
        """Return the number of stages on each rank: two halve the time that ranks wait."""
        return 1 if self.schedule in ("GPipe", "1F1B") else 2

    def dp_size(self, world_size: int) -> int:
        """Return the number of local batches per global batch: one for each pipeline."""
        if self.pipeline == 0:
            return self.replicas
        return world_size // self.pipeline

    def check(self, config: "Config", world_size: int) -> None:
        """Reject ranks that do not divide into pipelines, and what a pipeline cannot run."""
        # A pipeline of all ranks, 0, only needs replicas that divide the ranks.
        pipeline = max(1, self.pipeline)
        if world_size % (pipeline * self.replicas):
            raise UserError(
                f"parallel.pipeline x parallel.replicas is {pipeline} x {self.replicas}, "
                f"which does not divide {world_size} rank(s)"
            )
        ranks = world_size // self.dp_size(world_size)
        local_batch_size = max(1, config.data.global_batch_size // self.dp_size(world_size))
        size = config.data.micro_batch_size or local_batch_size
        self.check_microbatches(local_batch_size // size, ranks)
        # FSDP only reduces gradients that exist, and each local batch may leave out others.
        if config.train.allow_unused and ranks < world_size:
            raise UserError(
                "train.allow_unused does not work with several pipelines; "
                "set parallel.pipeline to 0"
            )
        # A GradScaler finds overflows in the gradients of its own rank, which differ between ranks.
        if config.train.precision == "fp16":
            raise UserError(
                "train.precision is fp16, "
                "whose scaler would skip steps on some ranks alone; give bf16"
            )

    def check_microbatches(self, microbatches: int, ranks: int) -> None:
        """Reject a number of micro-batches that the schedule cannot run on ``ranks`` ranks."""
        fits = True
        if self.schedule == "1F1B":
            fits = microbatches >= ranks
        elif self.schedule == "Interleaved1F1B":
            # PyTorch runs this schedule in equal rounds, of at least a micro-batch per rank.
            num_rounds = max(1, microbatches // ranks)
            fits = microbatches % num_rounds == 0
        if not fits:
            raise UserError(
                f"data.micro_batch_size makes {microbatches} micro-batch(es); "
                f"{self.schedule} takes any multiple of {ranks}"
            )
