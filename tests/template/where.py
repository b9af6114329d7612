"""Prints which files of the template a rendered file comes from; ``make where FILE=src/my_experiment/train.py``.

The file that is named first includes the others. Answers are given as for ``make demo``.
"""

from __future__ import annotations

import sys
from difflib import get_close_matches
from pathlib import Path

from renders import Recorder, derive


def find_sources(path: str, **answers: str) -> list[str]:
    """Return the templates of a rendered file; raises ValueError with near matches if there is no such file."""
    recorder, paths = Recorder(), list[str]()
    for file in recorder.render(derive(**answers)):
        if file.path == path:
            return recorder.used
        paths.append(file.path)
    near = [other for other in paths if Path(other).name == Path(path).name]
    near = near or get_close_matches(path, paths) or ["README.md", "src/my_experiment/train.py"]
    raise ValueError(f"these answers render no file {path!r}; give FILE={' or '.join(near)}")


if __name__ == "__main__":
    try:
        print(*find_sources(sys.argv[1], **dict(word.split("=", 1) for word in sys.argv[2:])), sep="\n")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
