"""The answers of ``plan``: a table for people, and a line of JSON for programs.

rank(s)  peak        weights     gradients   optimizer   communication activations
0-63     33.84 GiB   577.6 MiB   577.6 MiB   1.13 GiB    ...
"""

import json
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from ..runtime import set_exact_arithmetic
from .estimate import estimate_seconds, missing_options, traffic
from .ledger import KINDS
from .remedies import Change, find_remedy, fits
from .roles import Role, device_peak, largest, simulate_all
from .simulate import Project, Whole


def plan(project: Project, check: Callable[[Any, int], None]) -> int:
    """Simulate a step, and print what it takes; returns the exit code: 1 if it does not fit.

    Args:
        project: What is simulated.
        check: Rejects settings that cannot work on a number of ranks.
    """
    start = time.perf_counter()
    set_exact_arithmetic(project.config.train.exact)
    project = project.change("train", compile=False)
    whole, roles = simulate_all(project)
    tables = format_memory(project, roles), format_traffic(project, roles)
    print(describe_layout(project, whole, roles), *tables, format_time(project, roles), sep="\n\n")
    record = build_record(project, whole, roles)
    if not fits(project, roles):
        remedy, remedied = find_remedy(project, roles, check)
        changed = project
        for section, setting, value in remedy:
            changed = changed.change(section, **{setting: value})
        print(format_remedy(changed, remedy, remedied))
        record["fitting_settings"] = write_settings(remedy) if fits(changed, remedied) else None
    record["seconds_to_plan"] = round(time.perf_counter() - start, 1)
    print(json.dumps(record))
    return 0 if record["fits"] is not False else 1


def describe_layout(project: Project, whole: Whole, roles: list[Role]) -> str:
    """Describe what is simulated, and what is not."""
    config, options = project.config, project.options
    shares, microbatches = config.parallel.dp_size(options.ranks), config.train.microbatches
    batch = config.data.global_batch_size
    lines = [
        f"{options.ranks} rank(s) on {options.nodes} node(s); {whole.parameters:,} parameters; {batch} samples a step: "
        f"{batch // shares} in each of {shares} share(s), in {microbatches} micro-batch(es)",
        f"{len(roles)} rank(s) simulated, without values; the ranks of a row do the same",
        *filter(None, [project.layout.note]),
    ]
    #:: if cookiecutter.__plays ::#
    lines.append("collecting experience is not simulated; a step trains on a batch of it")
    #:: endif ::#
    return "\n".join(lines)


def format_memory(project: Project, roles: list[Role]) -> str:
    """Format the memory of each kind of rank at its peak, and whether it fits."""
    header = ["rank(s)", "peak", *KINDS, "operations"]
    rows = [
        [
            name_ranks(role.ranks),
            format_bytes(role.figures.peak),
            *(format_bytes(role.figures.memory[kind]) for kind in KINDS),
            f"{role.figures.flops:.3g}",
        ]
        for role in roles
    ]
    return f"{format_columns([header, *rows])}\n{judge(project, roles)}"


def judge(project: Project, roles: list[Role]) -> str:
    """Return whether the largest rank fits, in words."""
    memory, needed = project.options.device_memory, largest(project, roles)
    if memory is None:
        return f"a rank needs {format_bytes(needed)}, and what its driver takes; --device-memory says whether it fits"
    verdict, available = "fits" if fits(project, roles) else "does not fit", project.layout.rank_memory(memory)
    return f"{verdict}: a rank needs {format_bytes(needed)} of {format_bytes(available)}, and what its driver takes"


def format_traffic(project: Project, roles: list[Role]) -> str:
    """Format the messages of a step, of each kind of rank."""
    header = ["rank(s)", "collective", "link", "messages", "bytes", "sent by a rank"]
    rows = [
        [name_ranks(role.ranks), name, link, str(count), format_bytes(size), format_bytes(sent)]
        for role in roles
        for (name, link), (count, size, sent) in sorted(traffic(role, project.options).items())
    ]
    return format_columns([header, *rows]) if rows else "no messages between ranks in a step"


def format_time(project: Project, roles: list[Role]) -> str:
    """Format the estimated time of a step, or what is missing for it."""
    if missing := missing_options(roles, project.options):
        return f"no time of a step without {', '.join(missing)}: doctor measures them"
    slowest = max((estimate_seconds(project, role) for role in roles), key=lambda each: each["most"])
    times = {name: f"{1000 * seconds:.4g} ms" for name, seconds in slowest.items()}
    share = project.layout.waiting(roles[0].figures.strategy)
    waits = f" ({share:.1%} of it waiting for other ranks)" if share else ""
    return (
        f"a step takes {times['least']} to {times['most']}: {times['computing']} to compute{waits}, "
        f"{times['sending']} to send, together or one after the other"
    )


def format_remedy(project: Project, remedy: list[Change], roles: list[Role]) -> str:
    """Format the settings that fit, or say that this strategy has none."""
    settings = write_settings(remedy)
    needed = format_bytes(largest(project, roles))
    if fits(project, roles):
        return f"this fits, in {needed}: {settings}"
    found = f"at best {needed}, with {settings}" if settings else f"none needs less than {needed}"
    other = project.layout.other_strategy
    change = f"cruft update --variables-to-update '{json.dumps({'parallelism': other})}'"
    return (
        f"no settings of this strategy fit ({found}); try more ranks, or a project with parallelism={other}: render it "
        f"anew, or, if cruft made this one, {change}"
    )


def write_settings(remedy: list[Change]) -> str:
    """Return changes as arguments of a command line."""
    return " ".join(f"--{section}.{setting} {json.dumps(value)}".replace('"', "") for section, setting, value in remedy)


def build_record(project: Project, whole: Whole, roles: list[Role]) -> dict[str, Any]:
    """Return all answers, for a program."""
    options = project.options
    known = not missing_options(roles, options)
    return {
        "event": "plan",
        "world_size": options.ranks,
        "nodes": options.nodes,
        "parameters": whole.parameters,
        "fits": None if options.device_memory is None else fits(project, roles),
        "waiting_share": round(project.layout.waiting(roles[0].figures.strategy), 4),
        "ranks": [
            {
                "ranks": name_ranks(role.ranks),
                "peak_bytes": role.figures.peak,
                "device_bytes": device_peak(project, role),
                "memory_bytes": role.figures.memory,
                "flops": role.figures.flops,
                "messages": [
                    {"collective": name, "link": link, "messages": count, "bytes": size, "sent_bytes": round(sent)}
                    for (name, link), (count, size, sent) in sorted(traffic(role, options).items())
                ],
                **({"seconds": estimate_seconds(project, role)} if known else {}),
            }
            for role in roles
        ],
    }


def name_ranks(ranks: list[int]) -> str:
    """Return ascending numbers as ranges with steps: ``0-7``, ``0-6:2``, ``0,3,4``."""
    steps = {after - before for before, after in pairwise(ranks)}
    if len(steps) == 1:
        (step,) = steps
        return f"{ranks[0]}-{ranks[-1]}" + (f":{step}" if step > 1 else "")
    return ",".join(map(str, ranks))


def format_bytes(size: float) -> str:
    """Format a number of bytes with its unit."""
    power = 0
    while size >= 1024 and power < 4:
        size, power = size / 1024, power + 1
    return f"{size:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def format_columns(rows: list[list[str]]) -> str:
    """Format rows as columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
