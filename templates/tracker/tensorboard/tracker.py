"""TensorBoard: the records of a run as event files in ``run.dir/tensorboard``."""

from pathlib import Path
from typing import Any

import yaml
from torch.utils.tensorboard import SummaryWriter


class Tracker:
    """Writes what rank 0 logs; TensorBoard drops the records after the ``step`` that a run resumes from."""

    def __init__(self, run_dir: Path, settings: dict[str, Any], step: int) -> None:
        self.writer = SummaryWriter(run_dir / "tensorboard", purge_step=step + 1)
        self.writer.add_text("settings", f"```\n{yaml.safe_dump(settings, sort_keys=False)}```", step)

    def log(self, record: dict[str, Any]) -> None:
        """Write the numbers of a record, as ``train/loss`` or ``test/loss``."""
        split = record.get("split", "train")
        for name, value in record.items():
            if isinstance(value, int | float) and name != "step":
                self.writer.add_scalar(f"{split}/{name}", value, record["step"])
        self.writer.flush()  # Otherwise, a run that is killed would lose the records of up to two minutes.

    def close(self) -> None:
        """Close the event file."""
        self.writer.close()
