"""Tells which rank is lost when others wait for it in vain: it died, hangs, is late, or is in another collective.

A collective that fails knows that somebody did not answer, but often not who. So a rank that fails leaves word in the
store at which the ranks met, and reads what others left there; a rank without a word is lost.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist
from tqdm import tqdm

# Seconds to wait for the word of others: those that wait for the same rank give up at about the same time.
PATIENCE = 5.0


@dataclass
class Word:
    """What a rank leaves that has failed: whether it waited for others, where, and with what error."""

    waited: bool
    place: str
    error: str


@contextmanager
def lost_ranks_told(where: Callable[[], str]) -> Iterator[None]:
    """Put around what ranks do together: if they lose one of them, another tells in one line who it was.

    Args:
        where: Says how far this rank has come.
    """
    try:
        yield
    except Exception as error:
        if dist.get_world_size() > 1 and not hasattr(error, "__notes__"):
            tell(error, where())
        raise


def tell(error: Exception, where: str) -> None:
    """Leave word of an error; of one that comes from waiting, note (and print, once for all ranks) who is to blame."""
    rank, size = dist.get_rank(), dist.get_world_size()
    text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    words, store_gone = exchange(rank, size, Word(is_of_collective(error), place_of(error), text))
    if not words[rank].waited:
        error.add_note(f"rank {rank}, {where}")
        return
    line = f"{explain(words, size, where, store_gone)}. See 'When it goes wrong' in README.md"
    error.add_note(line)
    if rank == min(other for other in words if words[other].waited):
        # Now, for a launcher that ends this rank may leave no time for a traceback.
        tqdm.write(f"error: {line}", file=sys.stderr)
        sys.stderr.flush()


def is_of_collective(error: Exception) -> bool:
    """Whether this is the error of one who waited for other ranks; gloo's have no type of their own."""
    gloo = isinstance(error, RuntimeError) and re.search("gloo|collective|monitoredBarrier", str(error))
    return bool(gloo) or isinstance(error, dist.DistError)


def place_of(error: Exception) -> str:
    """The line of this package that an error came from."""
    package = Path(__file__).parent
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent == package]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}, {frames[-1].name}" if frames else "an unknown place"


def exchange(rank: int, size: int, word: Word) -> tuple[dict[int, Word], bool]:
    """Leave word for other ranks; one that waited also gathers theirs, for as long as ``PATIENCE``.

    Returns:
        The words by rank, this one's among them; and whether the store is gone, so that others may have left some.
    """
    store, words = dist.distributed_c10d._get_default_store(), {rank: word}
    gone = threading.Event()

    def gather() -> None:
        try:
            store.set(f"lost/{rank}", json.dumps(asdict(word)))
            while word.waited and len(words) < size:
                for other in set(range(size)) - words.keys():
                    if store.check([f"lost/{other}"]):
                        words[other] = Word(**json.loads(store.get(f"lost/{other}")))
                time.sleep(0.1)
        except dist.DistError:
            gone.set()

    # In a thread, for a store behind a broken link neither answers nor fails.
    thread = threading.Thread(target=gather, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return dict(words), gone.is_set()


def explain(words: Mapping[int, Word], size: int, where: str, store_gone: bool) -> str:
    """Who failed; else, of whom there is no word, if that can be known; else, where the ranks waited for each other."""
    failed = [f"rank {r} failed at {w.place}: {w.error}" for r, w in sorted(words.items()) if not w.waited]
    waited = [f"rank {r} waited at {w.place}" for r, w in sorted(words.items()) if w.waited]
    silent = ", ".join(str(rank) for rank in range(size) if rank not in words)
    if failed:
        return f"{where}, {'; '.join(failed)}"
    if silent and store_gone:
        return f"{where}, no word from rank 0 or its launcher: it is gone, with the store of the ranks; {waited[0]}"
    if silent:
        return f"{where}, no word from rank {silent}: it is dead, hangs, is late, or in another collective; {waited[0]}"
    return f"{where}, the ranks waited for each other in different collectives: {'; '.join(waited)}"
