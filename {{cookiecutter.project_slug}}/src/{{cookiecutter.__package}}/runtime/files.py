"""Files that are complete or absent, even if the machine stops in the middle of a write."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Fill a temporary file with ``write``, flush it to the disk, and rename it to ``path``.

    A write that fails, for example because the disk is full, leaves nothing behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    remove(temporary)  # A killed save left it.
    try:
        with disk_errors(temporary), open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def publish(temporary: Path, path: Path) -> None:
    """Rename a complete file or folder to its final name; what has it is removed when that is done."""
    nameless = path.with_suffix(".old.tmp")
    if path.is_dir() or temporary.is_dir():  # A folder replaces nothing, and is not replaced.
        remove(nameless)
        with suppress(FileNotFoundError):
            path.rename(nameless)
    os.replace(temporary, path)
    # The new name is an entry of the parent folder, which has to reach the disk as well.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # Some network filesystems cannot, and need not.
            raise
    finally:
        os.close(folder)
    with suppress(OSError):  # The next save removes it.
        remove(nameless)


def replace_text(path: Path, text: str) -> None:
    """Replace a small file so that readers see either the old or the new content, never a part of it."""
    write_atomically(path, lambda file: file.write(text.encode()))


def remove(path: Path) -> None:
    """Remove what is at ``path``, if anything; a folder is renamed before, so that no part is taken for the whole."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        nameless = path.with_suffix(".old.tmp")
        remove(nameless)
        shutil.rmtree(path.rename(nameless))


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise the system's error, such as that of a full disk, with the path; ``torch.save`` hides it behind its own."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__
        if isinstance(cause, OSError) and cause.errno is not None and cause.filename is None:
            raise OSError(cause.errno, cause.strerror, str(path)) from None
        raise
