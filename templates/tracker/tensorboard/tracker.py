#:: extends "tracker/shared/tracker.py" ::#
#// What TensorBoard adds to the tracker; the class around the blocks only shows where they belong. //#

class Tracker:
    def __init__(self) -> None:
        #:: block attributes ::#
        self.board: Any = None
        #:: endblock ::#

    def record(self, done: int) -> Iterator[None]:
            #:: block open ::#
            from torch.utils.tensorboard import SummaryWriter  # Slow to import, and only rank 0 needs it.

            self.board = stack.enter_context(SummaryWriter(self.run_dir / "tensorboard", purge_step=done + 1))
            #:: endblock ::#

    def log(self, record: dict[str, Any]) -> None:
        #:: block log ::#
        split = record.get("split", "train")
        for name, value in record.items():
            if isinstance(value, int | float) and name != "step":
                self.board.add_scalar(f"{split}/{name}", value, record["step"])
        #:: endblock ::#
