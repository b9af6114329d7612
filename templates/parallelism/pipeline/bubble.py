"""The bubble of a pipeline: the share of a step in which ranks wait, expected from the schedule and measured.

1F1B with 3 micro-batches on 2 ranks. A forward (F) takes 1, a backward (B) takes 2; 3 of 12 are bubble (..):

rank 0   F0 F1 .. .. B0 -- F2 B1 -- .. B2 --
rank 1   .. F0 B0 -- F1 B1 -- F2 B2 -- .. ..
"""

from collections.abc import Mapping, Sequence
from typing import Any

# Forward, full backward, and its two halves (for inputs and for weights): a backward does twice the work of a forward.
DURATION = {"F": 1, "B": 2, "I": 1, "W": 1}


def expected_bubble(parallel: Any) -> float:
    """Return the idle share of the schedule if all stages took equally long and sending took no time.

    With one stage on each of p ranks and m micro-batches it is (p - 1) / (m + p - 1) (Narayanan et al. 2021, section
    2.2); other schedules are simulated.

    Args:
        parallel: A pipeline strategy that has trained a step, so that its schedule is built.
    """
    if parallel.config.schedule in ("GPipe", "1F1B"):
        stages, microbatches = len(parallel.owners), parallel.microbatches
        return (stages - 1) / (microbatches + stages - 1)
    remaining = {rank: compute_actions(order) for rank, order in parallel.schedule.pipeline_order.items()}
    busy = sum(DURATION[kind] for actions in remaining.values() for _, kind, _ in actions)
    finished: dict[tuple[int, str, int], int] = {}
    clock = dict.fromkeys(remaining, 0)
    while any(remaining.values()):
        for rank, actions in remaining.items():
            while actions and all(before in finished for before in prerequisites(actions[0], len(parallel.owners))):
                stage, kind, microbatch = action = actions.pop(0)
                inputs = [finished[before] for before in prerequisites(action, len(parallel.owners))]
                clock[rank] = max([clock[rank], *inputs]) + DURATION[kind]
                finished[stage, "B" if kind == "I" else kind, microbatch] = clock[rank]
    return 1 - busy / (len(remaining) * max(clock.values()))


def compute_actions(order: Sequence[Any]) -> list[tuple[int, str, int]]:
    """Return one rank's computations in order, as (stage, kind, micro-batch), without waits and messages."""
    flat = [part for action in order if action is not None for part in action.sub_actions or (action,)]
    actions = [(part.stage_index, part.computation_type.value, part.microbatch_index) for part in flat]
    return [action for action in actions if action[1] in DURATION]


def prerequisites(action: tuple[int, str, int], stages: int) -> list[tuple[int, str, int]]:
    """Return the actions that have to finish before ``action``."""
    stage, kind, microbatch = action
    if kind == "F":
        return [(stage - 1, "F", microbatch)] if stage else []
    if kind == "W":
        return [(stage, "B", microbatch)]
    return [(stage + 1, "B", microbatch) if stage + 1 < stages else (stage, "F", microbatch)]


def watch_stages(parallel: Any, stopwatch: Any) -> None:
    """Measure how long this rank's stages compute, and how long the whole schedule takes."""
    stopwatch.watch(parallel.schedule, "step", "schedule")
    for stage in parallel.scheduled_stages:
        for method in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
            stopwatch.watch(stage, method, "computing")


def measured_bubble(ranks: Sequence[Mapping[str, float]]) -> float:
    """Return the share of the schedule in which ranks did not compute, over all ranks."""
    return 1 - sum(rank["computing"] for rank in ranks) / (len(ranks) * max(rank["schedule"] for rank in ranks))
