"""A stand-in for a machine's accelerators, which PyTorch loads like a vendor's backend. They can only be counted."""

from __future__ import annotations

from pathlib import Path

# PyTorch calls the entry points of this group when it is imported.
ENTRY_POINTS = "[torch.backends]\nstand_in = stand_in:register\n"
BACKEND = """
import os

def register():
    import torch.distributed as dist
    from torch.utils import backend_registration as backends

    class Module(backends._DummyBackendModule):
        def device_count(self):
            return int(os.environ["ACCELERATORS"])

        def is_available(self):
            return self.device_count() > 0

    backends._setup_privateuseone_for_python_backend("stand_in", backend_module=Module())
    dist.Backend.register_backend("stand_in", lambda *_: None, devices=["stand_in"])
"""


def install(folder: Path) -> Path:
    """Write the backend as an installed package into ``folder``, for PYTHONPATH; ACCELERATORS is their number."""
    metadata = folder / "stand_in-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: stand-in\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "stand_in.py").write_text(BACKEND)
    return folder
