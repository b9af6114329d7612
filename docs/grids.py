"""Which micro-batch each rank of a pipeline has in each turn: PyTorch's schedules run with a stage that only records.

.venv/bin/python docs/grids.py 4 6    # ranks, micro-batches
"""

import sys
from unittest.mock import MagicMock

from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe


def record(schedule: type, rank: int, ranks: int, microbatches: int) -> list[str]:
    """Return what a schedule runs on a rank, in its order: F0 is forward of micro-batch 0, B0 backward."""
    order: list[str] = []
    stage = MagicMock(stage_index=rank, num_stages=ranks, is_last=False)
    for kind in ("fwd_recv", "fwd_send", "bwd_recv", "bwd_send"):
        getattr(stage, f"get_{kind}_ops").return_value = []  # Nothing is sent.
    stage.forward_one_chunk.side_effect = lambda index, *_, **__: order.append(f"F{index}")
    stage.backward_one_chunk.side_effect = lambda index, **__: order.append(f"B{index}")
    run = schedule(stage, microbatches, loss_fn=abs)
    run._initialize_stage = MagicMock()
    run._step_microbatches()
    return order


def arrange(orders: list[list[str]]) -> list[list[str]]:
    """Return the turns of each rank: one forward or backward in each, once its neighbor has finished the same."""
    rows: list[list[str]] = [[] for _ in orders]
    while any(orders):
        turn = []
        for rank, order in enumerate(orders):
            neighbor = rank + (-1 if order and order[0][0] == "F" else 1)
            ready = order and (neighbor not in range(len(rows)) or order[0] in rows[neighbor])
            turn.append(order.pop(0) if ready else ".")
        for row, each in zip(rows, turn, strict=True):
            row.append(each)
    return rows


ranks, microbatches = map(int, sys.argv[1:])
for schedule in (ScheduleGPipe, Schedule1F1B):
    rows = arrange([record(schedule, rank, ranks, microbatches) for rank in range(ranks)])
    print(f"{schedule.__name__}: each rank works in {2 * microbatches} of {len(rows[0])} turns")
    for rank, row in enumerate(rows):
        kept = [str(row[:turn]).count("F") - str(row[:turn]).count("B") for turn in range(len(row))]
        print(f"rank {rank}  {' '.join(f'{each:2}' for each in row)}  keeps {max(kept)}")
