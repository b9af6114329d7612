"""The bubble of a pipeline: the part of a step in which ranks wait, as the schedule has it and as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .parallel import Parallel

# Forward, whole backward, and its two halves (for inputs and for weights): a backward does twice the work of a forward.
DURATION = {"F": 1, "B": 2, "I": 1, "W": 1}


def expected_bubble(parallel: Parallel) -> float:
    """The idle part of the schedule if all stages took equally long, and sending no time.

    With a stage on each of p ranks and m micro-batches it is (p - 1) / (m + p - 1) (Narayanan et al. 2021, section
    2.2); other schedules are played through.
    """
    if parallel.config.schedule in ("GPipe", "1F1B"):
        length, pieces = len(parallel.owners), parallel.microbatches
        return (length - 1) / (pieces + length - 1)
    todo = {rank: compute_actions(order) for rank, order in parallel.schedule.pipeline_order.items()}
    busy = sum(DURATION[kind] for actions in todo.values() for _, kind, _ in actions)
    finished: dict[tuple[int, str, int], int] = {}
    clock = dict.fromkeys(todo, 0)
    while any(todo.values()):
        for rank, actions in todo.items():
            while actions and all(need in finished for need in needs(actions[0], len(parallel.owners))):
                stage, kind, microbatch = action = actions.pop(0)
                start = max([clock[rank], *(finished[need] for need in needs(action, len(parallel.owners)))])
                clock[rank] = finished[stage, "B" if kind == "I" else kind, microbatch] = start + DURATION[kind]
    return 1 - busy / (len(todo) * max(clock.values()))


def compute_actions(order: Sequence[Any]) -> list[tuple[int, str, int]]:
    """What one rank computes, one after the other, as (stage, kind, micro-batch); waits and messages are left out."""
    flat = [part for action in order if action is not None for part in action.sub_actions or (action,)]
    actions = [(part.stage_index, part.computation_type.value, part.microbatch_index) for part in flat]
    return [action for action in actions if action[1] in DURATION]


def needs(action: tuple[int, str, int], stages: int) -> list[tuple[int, str, int]]:
    """What has to be done before ``action``."""
    stage, kind, microbatch = action
    if kind == "F":
        return [(stage - 1, "F", microbatch)] if stage else []
    if kind == "W":
        return [(stage, "B", microbatch)]
    return [(stage + 1, "B", microbatch) if stage + 1 < stages else (stage, "F", microbatch)]


def watch_stages(parallel: Parallel, stopwatch: Any) -> None:
    """Count the time in which this rank's stages compute, and that of the whole schedule."""
    stopwatch.watch(parallel.schedule, "step", "schedule")
    for stage in parallel.scheduled:
        for method in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
            stopwatch.watch(stage, method, "computing")


def measured_bubble(ranks: Sequence[Mapping[str, float]]) -> float:
    """The part of the schedule in which ranks did not compute, over all ranks."""
    return 1 - sum(rank["computing"] for rank in ranks) / (len(ranks) * max(rank["schedule"] for rank in ranks))
