"""How long a step takes, from the speed of a device and the bandwidth of links.

    computing    operations / speed, and what ranks wait; a device reaches a part of its peak, so give a measured speed
    sending      the bytes that a rank sends / bandwidth, on links within a node and between nodes

How far the two overlap depends on the machine, so the estimate is a range: the longer one alone, up to their sum. A
message that every rank waits for before it computes on never overlaps.
"""

from collections.abc import Mapping

from ..launch import PlanOptions
from .messages import spans
from .roles import Role
from .simulate import Project

WITHIN, BETWEEN = "within a node", "between nodes"


def traffic(role: Role, options: PlanOptions) -> dict[tuple[str, str], tuple[int, int, float]]:
    """Return what a rank sends in a step, by collective and link: (messages, bytes of their tensors, bytes sent)."""
    table: dict[tuple[str, str], tuple[int, int, float]] = {}
    for message in role.figures.messages:
        key = message.name, BETWEEN if spans(message.ranks, options.ranks_per_node()) else WITHIN
        count, size, sent = table.get(key, (0, 0, 0.0))
        table[key] = count + 1, size + message.size, sent + message.sent()
    return table


def missing_options(roles: list[Role], options: PlanOptions) -> list[str]:
    """Return the options without which no time can be estimated."""
    links = {link for role in roles for _, link in traffic(role, options)}
    needed = {"device_speed": True, "link_bandwidth": WITHIN in links, "node_bandwidth": BETWEEN in links}
    missing = [name for name, is_needed in needed.items() if is_needed and not vars(options)[name]]
    return [f"--{name.replace('_', '-')}" for name in missing]


def estimate_seconds(project: Project, role: Role) -> Mapping[str, float]:
    """Return the seconds that a rank computes, those that it sends, and the least and the most for the whole step."""
    options, waiting = project.options, project.layout.waiting(role.figures.strategy)
    assert options.device_speed is not None
    computing = role.figures.flops / options.device_speed / (1 - waiting)
    sending = blocking = 0.0
    for message in role.figures.messages:
        is_between = spans(message.ranks, options.ranks_per_node())
        seconds = message.sent() / ((options.node_bandwidth if is_between else options.link_bandwidth) or 1)
        sending += seconds
        blocking += seconds if project.layout.blocks(message) else 0
    least = blocking + max(computing, sending - blocking)
    return {"computing": computing, "sending": sending, "least": least, "most": computing + sending}
