"""Pictures of an episode: what the policy saw, what it did, and what it got; or an animation."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..runtime import write_atomically
from .examples import new_figure

MOST_LABELS = 8  # In a legend.


def draw_episode(steps: Sequence[tuple[np.ndarray, np.ndarray, float]]) -> Any:
    """Return a figure of an episode over its steps.

    Each has what the policy saw before it, of shape (numbers,), the action, of shape (), or (numbers,) if it is
    continuous, and the reward.
    """
    observations, actions, rewards = (np.array(column) for column in zip(*steps, strict=True))
    figure = new_figure(10, 7)
    panels = figure.subplots(3, 1, sharex=True)
    columns = (("observation", observations), ("action", actions), ("sum of rewards", rewards.cumsum()))
    for axes, (name, values) in zip(panels, columns, strict=True):
        lines = axes.plot(values, drawstyle="steps-post" if name == "action" else "default")
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
        if 1 < len(lines) <= MOST_LABELS:
            axes.legend(lines, [f"{name} {number}" for number in range(len(lines))])
    panels[-1].set_xlabel("step of the episode")
    figure.suptitle(f"first episode of the evaluation: return {rewards.sum():.6g} in {len(rewards)} steps")
    return figure


class Film:
    """An animation of the first environment of a vector."""

    def __init__(self) -> None:
        self.frames: list[Image.Image] = []
        self.frames_per_second = 30.0

    def add(self, vector: Any, is_filmed: bool) -> None:
        """Add a frame, in 256 colors, as the file has them."""
        if is_filmed:
            self.frames.append(Image.fromarray(vector.envs[0].render()).quantize())
            self.frames_per_second = vector.metadata.get("render_fps", 30)

    def save(self, path: Path) -> None:
        """Save the frames since the last time as a GIF."""
        (first, *others), self.frames = self.frames, []
        options: dict[str, Any] = {"duration": round(1000 / self.frames_per_second), "loop": 0}
        write_atomically(path, partial(first.save, format="GIF", save_all=True, append_images=others, **options))
