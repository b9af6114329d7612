"""Draws the confusion matrix in the last line of a file of records: confusion.py FILE PICTURE, as look.md says."""

import json
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

counts = np.array(json.loads(Path(sys.argv[1]).read_text().splitlines()[-1])["confusion"])
figure = Figure((4.5, 4), layout="constrained")
axes = figure.subplots()
# Only mistakes have a color: beside the many on the diagonal, they would not be seen.
mistakes = counts * (1 - np.eye(len(counts)))
axes.imshow(mistakes, cmap="Reds", vmax=2 * mistakes.max())
for label, prediction in zip(*np.nonzero(counts), strict=True):
    axes.text(prediction, label, counts[label, prediction], ha="center", va="center")
axes.set(xlabel="prediction", ylabel="label", xticks=range(len(counts)), yticks=range(len(counts)))
figure.savefig(sys.argv[2])
print(f"{int(mistakes.sum())} of {counts.sum()} are wrong")
