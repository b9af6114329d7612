"""Files that show at a glance what a run has come to: curves, and what the dataset shows of the model's work."""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..runtime import replace_text, write_atomically

Examples = Mapping[str, Callable[[], Any]]


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of this size in inches."""
    from matplotlib.figure import Figure  # Slow to import, so only here. It needs no display.

    return Figure(figsize=(width, height), dpi=100, layout="constrained")


def collect_examples(dataset: Any, evaluator: Any) -> Examples:
    """Return what ``dataset.examples``, which it need not have, returns for an evaluator; a collective.

    A mistake in it becomes an example that cannot be made; the failure of another rank is raised.
    """
    try:
        return dataset.examples(evaluator) if hasattr(dataset, "examples") else {}
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        return {"examples": partial(fail, error)}


def fail(error: Exception) -> None:
    """Raise an error of earlier."""
    raise error


def write_examples(run_dir: Path, examples: Examples) -> None:
    """Write a file for each name: the text, or the figure of Matplotlib, that its function returns.

    A file that cannot be made or written, for example because the disk is full, is left out with a warning.
    """
    for name, make in examples.items():
        try:
            content = make()
            if isinstance(content, str):
                replace_text(run_dir / name, content)
            else:
                write_atomically(run_dir / name, partial(content.savefig, format="png"))
        except Exception as error:  # Whatever it is, the run is complete without it.
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            print(f"warning: no {name} in {run_dir}: {reason}", file=sys.stderr)
