"""Sharded checkpoints: a folder into which every rank writes what it holds, while training continues.

step-00000440.dcp/
    __0_0.distcp, __1_0.distcp, ...    the tensors, one file per rank, written by torch.distributed.checkpoint (DCP)
    header.pt                          the rest of the state; the location and checksum of each tensor
    .metadata                          DCP's own index, for other tools; a pickle, so it is never loaded here
"""

import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from hashlib import blake2b
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

from ..config import UserError
from ..launch import first_line
from ..runtime import all_gather_object, disk_errors, publish, remove, write_atomically
from .content import DamagedCheckpointError
from .replicas import local_part, locate

HEADER = "header.pt"
DCP_INDEX = _StorageInfo(".metadata", offset=0, length=-1)  # The whole file: only its checksum is verified.

# The classes that describe tensors in the header, in addition to built-in types; they hold only data.
# BytesStorageMetadata is left out on purpose, so that no entry can be an object, which DCP would unpickle.
SAFE_GLOBALS: list[Any] = [
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.TensorStorageMetadata,
    metadata.TensorProperties,
    metadata._MEM_FORMAT_ENCODING,
    metadata.ChunkStorageMetadata,
    _StorageInfo,
]


class Writer(FileSystemWriter):
    """Writes the folder ``path`` under a temporary name, and renames it when all ranks are done: complete or absent.

    On rank 0, ``header`` is the content of the header file, ``names`` are those of its tensors, in the order to keep,
    and ``on_finish`` is called at the end.
    """

    def __init__(
        self,
        path: Path,
        header: Mapping[str, Any],
        names: Iterable[str],
        on_finish: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(path.with_suffix(".tmp"))
        self.temporary, self.target = path.with_suffix(".tmp"), path
        self.header, self.names, self.on_finish = header, list(names), on_finish

    def make_folder(self) -> None:
        """Create the folder, discarding what a killed save left; call it on one rank, before the others write."""
        remove(self.temporary)
        self.temporary.mkdir(parents=True)

    def storage_meta(self) -> metadata.StorageMeta | None:
        """Return nothing: a checkpoint may be moved, so it does not record where it was written."""
        return None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Write this rank's tensors; returns DCP's records of them, and their checksums."""
        with disk_errors(self.temporary):
            records = super().write_data(plan, planner).wait()
        done: Future[Any] = Future()
        done.set_result((records, compute_checksums(self.temporary, (record.storage_data for record in records))))
        return done

    def finish(self, metadata: metadata.Metadata, results: list[Any]) -> None:
        """Write the header and rename the folder, on rank 0, when all ranks have written their tensors."""
        # Without it, the names would be in the order of the ranks' shares.
        metadata.planner_data = dict.fromkeys(self.names) | metadata.planner_data
        super().finish(metadata, [records for records, _ in results])
        checksums = compute_checksums(self.temporary, [DCP_INDEX])
        for _, of_rank in results:
            checksums |= of_rank
        content = {**self.header, "metadata": metadata, "checksums": checksums}
        write_atomically(self.temporary / HEADER, lambda file: torch.save(content, file))
        publish(self.temporary, self.target)
        self.on_finish()


class Reader(FileSystemReader):
    """Reads tensors from the locations in the header, and verifies the checksums, as one of ``world_size`` readers."""

    def __init__(self, path: Path, header: Mapping[str, Any], rank: int = 0, world_size: int = 1) -> None:
        super().__init__(path)
        self.folder, self.metadata, self.checksums = path, header["metadata"], header["checksums"]
        self.share = slice(rank, None, world_size)

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Return the index from the header, instead of loading DCP's pickle."""
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Verify this rank's share of all checksums, and read what it needs."""
        infos = [DCP_INDEX, *self.storage_data.values()][self.share]
        for key, checksum in compute_checksums(self.folder, infos).items():
            if self.checksums.get(key) != checksum:
                raise DamagedCheckpointError(f"the checksum of {key[0]} is wrong at byte {key[1]}")
        return super().read_data(plan, planner)


def compute_checksums(folder: Path, infos: Iterable[_StorageInfo]) -> dict[tuple[str, int], int]:
    """Return the CRC-32 of byte ranges in the files of ``folder``, by file name and offset."""
    checksums = {}
    for info in infos:
        with open(folder / info.relative_path, "rb") as file:
            file.seek(info.offset)
            checksums[info.relative_path, info.offset] = zlib.crc32(file.read(info.length))
    return checksums


def start_save(tensors: dict[str, Tensor], writer: Writer, group: dist.ProcessGroup) -> futures.Future[Any]:
    """Copy what this rank is to write to the CPU, and write the copy in a thread; a collective.

    The threads exchange messages while training does, so ``group`` must have no other use.
    """
    share = select_share(tensors)
    pending = state_dict_saver.async_save(share, storage_writer=writer, process_group=group)
    assert isinstance(pending, futures.Future)  # It is one unless copying is asynchronous as well.
    return pending


def select_share(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that this rank is to write: ranks that hold the same parts of all share them. A collective.

    DCP itself writes a part once, but every rank that holds it would wait until it has a copy.
    """
    by_size = sorted((local_part(each).nbytes, locate(name, each)) for name, each in tensors.items())
    own = blake2b(repr(by_size).encode()).digest()
    alike = [rank for rank, each in enumerate(all_gather_object(own)) if each == own]
    # In turn, so that each rank copies about as much.
    turn = by_size[alike.index(dist.get_rank()) :: len(alike)]
    share = {name for _, (name, _) in turn}
    return {name: each for name, each in tensors.items() if name in share}


def load(path: Path, header: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Fill the tensors that this rank holds; together, the ranks verify every checksum. A collective.

    Raises:
        DamagedCheckpointError: on every rank, if one could not read its part, or found a wrong checksum.
    """
    with one_line_errors(f"{path} is not a readable checkpoint", DamagedCheckpointError):
        reader = Reader(path, header, dist.get_rank(), dist.get_world_size())
        state_dict_loader.load(tensors, storage_reader=reader)


def save_in_one_process(path: Path, header: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write a folder; not a collective."""
    writer = Writer(path, header, tensors)
    writer.make_folder()
    with one_line_errors(f"{path} could not be written", UserError):
        state_dict_saver.save(tensors, storage_writer=writer, no_dist=True)


def load_in_one_process(path: Path, header: Mapping[str, Any], part: str = "") -> dict[str, Tensor]:
    """Return the tensors of a folder whose names begin with ``part``, whole; not a collective.

    Raises:
        DamagedCheckpointError: if they do not match the header, or are too large for this machine.
    """
    try:
        saved = header["metadata"].state_dict_metadata
        # In the order of the model.
        names = [name for name in header["metadata"].planner_data if name.startswith(part)]
        tensors = {name: torch.empty(saved[name].size, dtype=saved[name].properties.dtype) for name in names}
    except RuntimeError as error:
        raise DamagedCheckpointError(f"{path} is not a readable checkpoint: {first_line(error)}") from None
    with one_line_errors(f"{path} is not a readable checkpoint", DamagedCheckpointError):
        state_dict_loader.load(tensors, storage_reader=Reader(path, header), no_dist=True)
    return tensors


@contextmanager
def one_line_errors(message: str, kind: type[UserError]) -> Iterator[None]:
    """Raise the first error of any rank as one line, a ``kind`` with ``message``; DCP has a traceback for each."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
            yield
    except CheckpointException as error:
        first = next(failure for failure, _ in error.failures.values())
        raise kind(f"{message}: {first_line(first)}") from None
