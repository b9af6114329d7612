"""Pictures of what a classifier does: its confusion matrix, and images with captions."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .examples import new_figure


def draw_confusion(target: np.ndarray, prediction: np.ndarray, names: Sequence[str]) -> Any:
    """Return a figure that counts how often each class, a row, was predicted to be each class, a column.

    ``target`` and ``prediction`` are class numbers of shape (samples,); colors are shares of the row.
    """
    classes = range(len(names))
    counts = np.zeros((len(names), len(names)), dtype=np.int64)
    np.add.at(counts, (target, prediction), 1)
    shares = counts / counts.sum(axis=1, keepdims=True).clip(1)
    figure = new_figure(7, 6)
    axes = figure.subplots()
    figure.colorbar(axes.imshow(shares, cmap="Blues", vmin=0, vmax=1), label="share of the true class")
    axes.set(xlabel="predicted class", ylabel="true class", title=f"{len(target)} test samples, number of each")
    axes.set(xticks=classes, yticks=classes, xticklabels=names, yticklabels=names)
    for row, column in zip(*counts.nonzero(), strict=True):
        color = "white" if shares[row, column] > 0.5 else "black"
        axes.text(column, row, str(counts[row, column]), ha="center", va="center", color=color)
    return figure


def draw_images(images: Sequence[np.ndarray], captions: Sequence[str], title: str) -> Any:
    """Return a figure of images of shape (height, width), all of one size, with a caption above each."""
    columns = 10
    figure = new_figure(columns, 1 + 1.1 * math.ceil(len(images) / columns))
    axes = figure.subplots()
    axes.set_title(title)
    axes.set_axis_off()
    if images:
        height, width = images[0].shape
        down, across = height + 0.4 * height, width + 0.2 * width  # From one image to the next.
        for number, (image, caption) in enumerate(zip(images, captions, strict=True)):
            left, top = number % columns * across, number // columns * down
            axes.imshow(image, cmap="gray_r", extent=(left, left + width, top + height, top))
            axes.text(left + width / 2, top - 0.05 * height, caption, ha="center", va="bottom", fontsize=9)
        axes.set(xlim=(0, columns * across), ylim=(math.ceil(len(images) / columns) * down, -0.4 * height))
    return figure
