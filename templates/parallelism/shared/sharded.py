"""Sharded checkpoints: every rank writes what it holds while training continues; a folder is complete or absent.

The format is that of ``torch.distributed.checkpoint``. A run resumes from it under any strategy. Resume only from files
that you trust: unlike a full checkpoint, it is read with pickle, and has no checksums.
"""

import json
import os
import shutil
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.tensor import DTensor

from . import checkpoint
from .checkpoint import list_checkpoints, lock
from .config import Config, UserError
from .distributed import Process


class Checkpointer(checkpoint.Checkpointer):
    """Saves a run in ``checkpoint.format``, and resumes it from either format."""

    def __init__(self, parallel: Any, optimizer: Any, lengths: list[int], config: Config, process: Process) -> None:
        super().__init__(parallel, optimizer, lengths, config, process)
        timeout = timedelta(seconds=config.distributed.timeout_seconds)
        self.group = dist.new_group(backend="gloo", timeout=timeout)  # Its messages never mix with those of training.
        self.pending: Any = None

    def save(self, progress: dict[str, int]) -> None:
        """Save the run as it is now; a sharded checkpoint is written in the background."""
        if self.config.checkpoint.format == "full":
            return super().save(progress)
        self.finish()
        self.parallel.average_buffers()
        parameters = self.parallel.module.named_parameters()
        local = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in parameters}
        if bad := max(self.process.all_gather([name for name, part in local.items() if not part.isfinite().all()])):
            raise UserError(f"{bad[0]} is not finite after step {progress['step']}, which is not saved")
        self.final = self.folder / f"step-{progress['step']:08d}.dcp"
        self.partial = self.final.with_suffix(".dcp.tmp")
        for path in (self.final, self.partial):  # Of an earlier start.
            self.process.on_main(partial(shutil.rmtree, path, ignore_errors=True))
        content = self.local_state() | {"header": json.dumps(self.header(progress))}
        self.pending = dcp.async_save(content, checkpoint_id=self.partial, process_group=self.group)
        self.pending.add_done_callback(partial(self.publish, self.partial, self.final))

    def local_state(self) -> dict[str, Any]:
        """Return this rank's part of the model and of the optimizer's state, by name of parameter."""
        model, optimizer = dsd.get_state_dict(self.parallel.module, self.optimizer)
        return {"model": model, "optimizer": {"state": optimizer["state"]}}

    def publish(self, folder: Path, final: Path, future: Any) -> None:
        """Give a checkpoint its name when it is complete, which rank 0 is the last to know."""
        if self.process.rank == 0 and not future.exception():
            with suppress(FileNotFoundError):  # Done already.
                os.replace(folder, final)

    def finish(self) -> None:
        """Wait until a pending checkpoint is complete; raises what went wrong."""
        if self.pending:
            pending, self.pending = self.pending, None
            try:
                pending.result()
            except (Exception, dcp.CheckpointException) as error:
                raise UserError(f"{self.final} was not written; disk full? {str(error).splitlines()[-1]}") from None
            self.process.on_main(lambda: self.publish(self.partial, self.final, pending))

    def restore(self) -> tuple[int, list[str]]:
        """Load what the run starts from; of a sharded checkpoint, each rank reads its own part."""
        newest = self.process.on_main(lambda: [Path(), *list_checkpoints(self.folder)][-1])
        if newest.suffix != ".dcp" or self.config.checkpoint.resume == "never":
            return super().restore()
        self.process.on_main(lambda: lock(Path(self.config.run.dir)))
        try:
            return self.load_shards(newest)
        except dcp.CheckpointException:  # Rank 0 sets it aside, and reads an older one.
            steps, changes = super().restore()
            if not steps:  # There is none, and some initial values may have been replaced.
                raise UserError(f"{newest} is damaged, and there is no older checkpoint; start again") from None
            return steps, changes

    def load_shards(self, folder: Path) -> tuple[int, list[str]]:
        """Load this rank's part of a sharded checkpoint."""
        content: dict[str, Any] = {"header": ""}
        dcp.load(content, checkpoint_id=folder, process_group=self.group)  # Before a part that may not fit the model.
        header = json.loads(content["header"])
        changes = self.compare(header["config"])
        content, module = self.local_state(), self.parallel.module
        dcp.load(content, checkpoint_id=folder, process_group=self.group)
        dsd.set_model_state_dict(module, content["model"])
        groups = dsd.get_optimizer_state_dict(module, self.optimizer)["param_groups"]  # Those of the settings.
        dsd.set_optimizer_state_dict(module, self.optimizer, content["optimizer"] | {"param_groups": groups})
        return header["progress"]["step"], changes
