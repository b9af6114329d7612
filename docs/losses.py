"""Losses of the loop of from-a-loop.md on 1, 2 and 4 ranks, each step's averaged over the ranks.

.venv/bin/python ../ddp-template/docs/losses.py losses.svg    # In a project with that loop.py.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

LINE = "        loss = cross_entropy(ddp(images), labels)\n"
PRINT = '        print(f"of rank {rank}: {loss.item()}\\n", end="")\n'
program, means = Path("loop.py").read_text(), {}
assert LINE in program, "loop.py is not that of the section on DDP"
Path("losses_loop.py").write_text(program.replace(LINE, LINE + PRINT))
for ranks in (1, 2, 4):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    printed = subprocess.run([*command, "losses_loop.py"], stdout=subprocess.PIPE, text=True, check=True).stdout
    lines = [line.removeprefix("of rank ").split(": ") for line in printed.splitlines() if line.startswith("of rank ")]
    means[ranks] = np.mean([[float(loss) for rank, loss in lines if rank == str(r)] for r in range(ranks)], axis=0)
figure = Figure((8, 3), layout="constrained")
losses, differences = figure.subplots(1, 2)
for (ranks, mean), width in zip(means.items(), (6, 3, 1), strict=True):
    losses.plot(mean, linewidth=width, label=f"{ranks} rank{'s' * (ranks > 1)}")
    if ranks > 1:
        differences.plot(abs(mean - means[1]), f"C{ranks // 2}", label=f"{ranks} ranks")
        print(f"{ranks} ranks differ from one by at most {abs(mean - means[1]).max():.1e} in {len(mean)} steps")
losses.set(xlabel="step", ylabel="loss")
differences.set(xlabel="step", ylabel="difference from one rank")
for axes in (losses, differences):
    axes.legend()
figure.savefig(sys.argv[1])
