"""TensorBoard: the records of a run as event files in ``run.dir/tensorboard``."""

from pathlib import Path
from typing import Any

import yaml
from torch.utils.tensorboard import SummaryWriter


class Tracker:
    """Writes the records of rank 0 as TensorBoard's events."""

    def __init__(self, run_dir: Path, settings: dict[str, Any], step: int) -> None:
        """Write the settings, and continue after ``step``, which is 0 for a new run."""
        # A killed run may have written events of later steps, which the resumed run writes again:
        # purge_step makes TensorBoard ignore the earlier ones.
        self.writer = SummaryWriter(run_dir / "tensorboard", purge_step=step + 1)
        text = yaml.safe_dump(settings, sort_keys=False)
        self.writer.add_text("settings", f"```\n{text}```", step)

    def log(self, record: dict[str, Any]) -> None:
        """Write the numbers of a record, named such as ``train/loss`` or ``validation/loss``."""
        split = record.get("split", "train")
        for name, value in record.items():
            if isinstance(value, int | float) and name != "step":
                self.writer.add_scalar(f"{split}/{name}", value, record["step"])
        # The writer would keep events in memory for up to two minutes, and a kill would lose them.
        self.writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self.writer.close()
