"""Sharded checkpoints: a folder into which every rank writes what it holds, while training goes on.

``torch.distributed.checkpoint`` (DCP) writes and reads the tensors, a file a rank. ``header.pt`` holds all the rest:
what a full checkpoint says beside its tensors, and for each tensor where it lies and its checksum. DCP's ``.metadata``
repeats some of it for other tools; it is a pickle, whose loading may run code, and is never loaded here.
"""

from __future__ import annotations

import shutil
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import metadata, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.futures import Future

from .config import UserError
from .rundir import DamagedError, disk_errors, publish, remove, write_atomically

HEADER = "header.pt"
PICKLE = _StorageInfo(".metadata", offset=0, length=-1)  # All of it: its checksum is looked at, and nothing else.

# What describes tensors in the header, beside plain values: classes of data alone. Without BytesStorageMetadata among
# them there are no entries that are objects, which DCP would unpickle.
DESCRIPTIONS: list[Any] = [
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.TensorStorageMetadata,
    metadata.TensorProperties,
    metadata._MEM_FORMAT_ENCODING,
    metadata.ChunkStorageMetadata,
    _StorageInfo,
]


class Writer(FileSystemWriter):
    """Writes under a temporary name, and gives the folder its own when all ranks are done: complete or absent.

    Args:
        path: The folder.
        header: What is to be in its header, on rank 0 (elsewhere not looked at).
        then: What rank 0 does afterwards.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], then: Callable[[], None] = lambda: None) -> None:
        super().__init__(path.with_suffix(".tmp"))
        self.temporary, self.target, self.header, self.then = path.with_suffix(".tmp"), path, header, then

    def make_folder(self) -> None:
        """Make the folder, with nothing in it of a save that was killed; on one rank, before the others write."""
        if self.temporary.exists():
            shutil.rmtree(self.temporary)
        self.temporary.mkdir(parents=True)

    def storage_meta(self) -> metadata.StorageMeta | None:
        """Nothing: a checkpoint may be moved, and does not say where it was written."""
        return None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Write this rank's tensors; gives DCP's records of them, and their checksums."""
        with disk_errors(self.temporary):
            records = super().write_data(plan, planner).wait()
        done: Future[Any] = Future()
        done.set_result((records, compute_checksums(self.temporary, (record.storage_data for record in records))))
        return done

    def finish(self, metadata: metadata.Metadata, results: list[Any]) -> None:
        """On rank 0, when all ranks have written their tensors."""
        super().finish(metadata, [records for records, _ in results])
        checksums = compute_checksums(self.temporary, [PICKLE])
        for _, some in results:
            checksums |= some
        content = {**self.header, "metadata": metadata, "checksums": checksums}
        write_atomically(self.temporary / HEADER, lambda file: torch.save(content, file))
        if self.target.exists():  # Damaged, or the run would have gone on from it.
            remove(self.target)
        publish(self.temporary, self.target)
        self.then()


class Reader(FileSystemReader):
    """Reads tensors where the header says that they are, if they are as they were written."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        super().__init__(path)
        self.folder, self.metadata, self.checksums = path, header["metadata"], header["checksums"]

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """What the header says, in place of DCP's pickle."""
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Look at a share of all checksums, and read what this rank needs.

        Raises:
            DamagedError: if a checksum is wrong.
        """
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        places = [PICKLE, *self.storage_data.values()][rank::size]
        for place, checksum in compute_checksums(self.folder, places).items():
            if self.checksums.get(place) != checksum:
                raise DamagedError(f"the checksum of {place[0]} is wrong at byte {place[1]}")
        return super().read_data(plan, planner)


def compute_checksums(folder: Path, places: Iterable[_StorageInfo]) -> dict[tuple[str, int], int]:
    """The CRC-32 of some places in the files of ``folder``, by file name and offset."""
    checksums = {}
    for place in places:
        with open(folder / place.relative_path, "rb") as file:
            file.seek(place.offset)
            checksums[place.relative_path, place.offset] = zlib.crc32(file.read(place.length))
    return checksums


def start_save(tensors: dict[str, Tensor], writer: Writer, group: dist.ProcessGroup) -> futures.Future[Any]:
    """Copy what this rank holds to the CPU, and have a thread write the copy; a collective.

    Args:
        tensors: What this rank holds, by name; may change as soon as this returns.
        writer: Whose folder has been made.
        group: Of all ranks and of its own, for the threads exchange messages while training does.
    """
    pending = state_dict_saver.async_save(tensors, storage_writer=writer, process_group=group)
    assert isinstance(pending, futures.Future)  # Which it is where copying was not put off.
    return pending


def finish_save(pending: futures.Future[Any], path: Path) -> None:
    """Wait for a save; a collective.

    Raises:
        UserError: on every rank, if one of them could not write.
    """
    with told_in_one_line(f"{path} could not be written", UserError):
        pending.result()


def load(path: Path, header: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Fill the tensors that this rank holds; between them, the ranks look at every checksum. A collective.

    Raises:
        DamagedError: on every rank, if one of them could not read what it needs, or found a checksum wrong.
    """
    with told_in_one_line(f"{path} is not a readable checkpoint", DamagedError):
        state_dict_loader.load(tensors, storage_reader=Reader(path, header))


def save_alone(path: Path, header: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write a folder in one process, without a process group."""
    writer = Writer(path, header)
    writer.make_folder()
    with told_in_one_line(f"{path} could not be written", UserError):
        state_dict_saver.save(tensors, storage_writer=writer, no_dist=True)


def load_alone(path: Path, header: Mapping[str, Any]) -> dict[str, Tensor]:
    """All tensors of a folder, whole, in one process and without a process group.

    Raises:
        DamagedError: if they are not what the header says, or too large for this machine.
    """
    try:
        saved = header["metadata"].state_dict_metadata
        order = header["metadata"].planner_data  # That of the model.
        tensors = {name: torch.empty(saved[name].size, dtype=saved[name].properties.dtype) for name in order}
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
        raise DamagedError(f"{path} is not a readable checkpoint: {str(error).splitlines()[0]}") from None
    load(path, header, tensors)
    return tensors


@contextmanager
def told_in_one_line(what: str, kind: type[UserError]) -> Iterator[None]:
    """Raise what failed on any rank as one error of ``kind`` that says ``what``; DCP has a traceback for each."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
            yield
    except CheckpointException as error:
        first = next(failure for failure, _ in error.failures.values())
        raise kind(f"{what}: {str(first) or type(first).__name__}") from None
