"""Bytes per parameter that each of four ranks holds, from the table of estimates in costs.md.

.venv/bin/python docs/memory.py docs/memory.svg
"""

import re
import sys
from pathlib import Path

from matplotlib.figure import Figure

ROW = re.compile(r"^\| (\w+), (\d) ranks?(?:, rank (\d))? \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", re.MULTILINE)
found = ROW.finditer(Path(__file__).with_name("costs.md").read_text())
rows = {match.group(1, 2, 3): [float(gib) for gib in match.group(4, 5, 6)] for match in found}
whole = rows["fsdp", "1", None]  # On one rank, as under DDP.
panels = {"DDP": [whole] * 4, "FSDP2": [rows["fsdp", "4", None]] * 4, "tensor": [rows["tensor", "4", None]] * 4}
panels["pipeline"] = [rows["pipeline", "4", str(rank)] for rank in range(4)]
figure = Figure((8, 3), layout="constrained")
for axes, (name, ranks) in zip(figure.subplots(1, 4, sharey=True), panels.items(), strict=True):
    bottom = [0.0] * 4
    for part, label in enumerate(("weights", "gradients", "moments")):
        heights = [4 * row[part] / whole[0] for row in ranks]  # A weight has 4 bytes.
        axes.bar(range(4), heights, bottom=bottom, label=label)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    axes.set(title=name, xlabel="rank", xticks=range(4))
    print(name, *(f"{total:.1f}" for total in bottom))
    if name == "DDP":
        axes.set(ylabel="bytes per parameter of the model", yticks=range(0, 17, 4))
    elif name == "FSDP2":
        axes.legend()
figure.savefig(sys.argv[1])
