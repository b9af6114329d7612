"""Sends a run's records to #:: block title ::##:: endblock ::#.

    rank 0         trains, and writes metrics.jsonl; it never waits, except for PATIENCE at the end
    this program   follows that file as ``tail -f`` does, and sends what is new; it ends with rank 0

So a service that fails, hangs or is slow costs one warning. As a program it imports neither PyTorch nor this package.
"""

#:: block imports ::#
import json
import os
import re
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
#:: endblock ::#
from typing import Any, BinaryIO, Self

import yaml

# Seconds that a run waits for this program at its end, by how it ended.
PATIENCE = {"finished": 60.0, "stopped": 5.0, "failed": 5.0}
PICTURES = ("curves.png", "confusion.png", "misread.png", "episode.png")
TEXTS = ("config.yaml", "provenance.json", "samples.txt")
# A record: its split, its step, and its metrics under the names that the service gets.
Row = tuple[str, int, dict[str, float]]
AGAIN = "the same train command sends what is missing"


class Follower:
    """Rank 0's side: this program, started for the duration of a ``with`` block."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.outcome = run_dir, "failed"
        # Without this folder, and the current one, on its path. A session of its own gets no Ctrl-C. What the service's
        # library prints goes to a file; rank 0 holds the other end of stdin.
        command = [sys.executable, "-P", __file__, str(run_dir)]
        self.process: subprocess.Popen[bytes] | None = None
        try:
            with open(run_dir / "tracker.log", "wb") as log:
                self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, start_new_session=True)
        except OSError as error:
            print(f"warning: {SERVICE} is left out, because its process cannot start: {error}", file=sys.stderr)

    def __enter__(self) -> Self:
        return self

    def end(self, outcome: str) -> None:
        """Note how the run has ended; otherwise it has failed."""
        self.outcome = outcome

    def __exit__(self, *_: object) -> None:
        """Give the program a bounded time to send the rest."""
        if self.process is None:
            return
        seconds = PATIENCE[self.outcome]
        try:
            self.process.communicate(self.outcome.encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            line = f"warning: {SERVICE} was not done {seconds:.0f} s after the end of {self.run_dir}; {AGAIN}"
            print(line, file=sys.stderr)


#:: block service ::#
SERVICE = ""


class Service:
    def __init__(self, run_dir: Path, settings: dict[str, Any], provenance: dict[str, Any]) -> None:
        raise NotImplementedError

    def log(self, rows: Sequence[Row]) -> None:
        raise NotImplementedError

    def finish(self, outcome: str, files: Sequence[Path]) -> None:
        raise NotImplementedError
#:: endblock ::#


class Rank:
    """This program's side: how the run has ended, once it has. A rank 0 that is gone ends this program."""

    def __init__(self) -> None:
        self.ended, self.outcome = threading.Event(), ""
        threading.Thread(target=self.wait, daemon=True).start()

    def wait(self) -> None:
        """Wait for the outcome; the end of stdin without one is that of a killed rank."""
        self.outcome = sys.stdin.read()
        if not self.outcome:
            os._exit(1)
        self.ended.set()


def follow(run_dir: Path, rank: Rank) -> None:
    """Send the records of a run until it has ended, then its pictures and texts."""
    settings = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    provenance = json.loads((run_dir / "provenance.json").read_bytes())
    with open(run_dir / "metrics.jsonl", "rb") as metrics:
        service = Service(run_dir.resolve(), settings, provenance)
        has_ended = False
        while not has_ended:
            has_ended = rank.ended.wait(0.5)  # Before the last look.
            service.log([to_row(record) for record in read_records(metrics)])
    files = [run_dir.resolve() / name for name in (*TEXTS, *PICTURES)]
    service.finish(rank.outcome, [path for path in files if path.exists()])


def read_records(metrics: BinaryIO) -> list[dict[str, Any]]:
    """Return the records that were written since the last call; a line that is being written is left."""
    lines = []
    while (line := metrics.readline()).endswith(b"\n"):
        lines.append(line)
    metrics.seek(-len(line), os.SEEK_CUR)
    return [json.loads(line) for line in lines]


def to_row(record: dict[str, Any]) -> Row:
    """Return what a service gets of a record: its numbers, the step too, by which a resumed run knows what it has."""
    split = record.get("split", "train")
    numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
    return split, record["step"], {f"{split}/{name}": value for name, value in numbers.items()}


def redact(text: str) -> str:
    """Return a text without the passwords of its URLs, which may contain any sign but a space."""
    return re.sub(r"//\S*@", "//", text)


def say(text: str) -> None:
    """Print one line where the run prints."""
    print(redact(" ".join(text.split())), file=CONSOLE, flush=True)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # Rank 0 answers them, and then ends this program.
    CONSOLE = os.fdopen(os.dup(sys.stderr.fileno()), "w")
    os.dup2(sys.stdout.fileno(), sys.stderr.fileno())
    os.nice(10)  # The ranks need the processors.
    try:
        follow(Path(sys.argv[1]), Rank())
    except BaseException as error:
        reason = redact(f"{type(error).__name__}: {error}")[:300]
        say(f"warning: {SERVICE} failed ({reason}); the run goes on without it, and {AGAIN}")
        print(redact(traceback.format_exc()), flush=True)  # To tracker.log.
        os._exit(1)
