#:: extends "tracker/base.py" ::#
#// What TensorBoard adds to the tracker; the class around the blocks only shows where they stand. //#

class Tracker:
    def __init__(self, done: int) -> None:
        #:: block start ::#
        from torch.utils.tensorboard import SummaryWriter  # Slow to import, and only rank 0 needs it.

        self.board = SummaryWriter(self.folder / "tensorboard", purge_step=done + 1)
        #:: endblock ::#

    def __exit__(self) -> None:
        #:: block end ::#
        self.board.close()
        #:: endblock ::#

    def log(self, record: dict[str, Any]) -> None:
        #:: block log ::#
        split = record.get("split", "train")
        for name, value in record.items():
            if isinstance(value, int | float) and name != "step":
                self.board.add_scalar(f"{split}/{name}", value, record["step"])
        #:: endblock ::#
