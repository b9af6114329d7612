"""What ``plan`` is asked about: ranks, nodes, and what is known of them, in amounts with units.

--ranks 64 --nodes 8           64 ranks, 8 on each node
--device-memory 80GB           what a rank has; GiB and MiB are units, too
--device-speed 300TFLOP/s      what a rank computes
--link-bandwidth 200GB/s       what a rank sends to one on the same node
--node-bandwidth 50GB/s        what a rank sends to another node
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..config import UserError
from .arguments import Option

PREFIXES = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
PREFIXES |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
AMOUNT = re.compile(r"(\d+\.?\d*|\.\d+) *([kKMGTP]i?)?(B|B/s|FLOP/s)")
# The unit of each amount; the other options are numbers.
UNITS = {"device_memory": "B", "device_speed": "FLOP/s", "link_bandwidth": "B/s", "node_bandwidth": "B/s"}
PLAN_OPTIONS = (
    Option("ranks", "Number of ranks, over all nodes."),
    Option("nodes", "Number of nodes, with equally many ranks; 1 if it is left out."),
    Option("device_memory", "Memory of a device, as 80GB."),
    Option("device_speed", "What a rank computes, as 300TFLOP/s; doctor measures it."),
    Option("link_bandwidth", "What a rank sends to another on the same node, as 200GB/s."),
    Option("node_bandwidth", "What a rank sends to another node, as 50GB/s."),
)


@dataclass(frozen=True)
class PlanOptions:
    """The machines that ``plan`` is asked about; None is what is not known.

    Attributes:
        ranks: Number of ranks, over all nodes.
        nodes: Number of nodes, each with equally many ranks.
        device_memory: Bytes that a rank has.
        device_speed: Floating-point operations per second of a rank.
        link_bandwidth: Bytes per second that a rank sends to another on its node.
        node_bandwidth: Bytes per second that a rank sends to another node.
    """

    ranks: int
    nodes: int = 1
    device_memory: float | None = None
    device_speed: float | None = None
    link_bandwidth: float | None = None
    node_bandwidth: float | None = None

    def ranks_per_node(self) -> int:
        """Return the number of ranks on each node."""
        return self.ranks // self.nodes


def read_plan_options(given: Mapping[str, str]) -> PlanOptions:
    """Read the options of ``plan``, by name; rejects what is no number or no amount, and unequal nodes."""
    if "ranks" not in given:
        raise UserError("plan needs --ranks N, the number of ranks to plan for")
    counts = {name: read_count(name, given[name]) for name in ("ranks", "nodes") if name in given}
    amounts = {name: read_amount(name, given[name]) for name in UNITS if name in given}
    options = replace(PlanOptions(**counts), **amounts)  # type: ignore[arg-type]
    if options.ranks % options.nodes:
        raise UserError(f"--ranks {options.ranks} does not divide into --nodes {options.nodes}; give a multiple")
    return options


def read_count(name: str, value: str) -> int:
    """Read a number of ranks or nodes."""
    if not value.isdecimal() or not 0 < int(value) <= 2**20:
        raise UserError(f"--{name} is '{value}'; give a whole number, 1 or more")
    return int(value)


def read_amount(name: str, value: str) -> float:
    """Read an amount with the unit of its option."""
    unit, option = UNITS[name], f"--{name.replace('_', '-')}"
    match = AMOUNT.fullmatch(value)
    if not match or match[3] != unit or not float(match[1]):
        example = {"B": "80GB", "B/s": "50GB/s", "FLOP/s": "300TFLOP/s"}[unit]
        raise UserError(f"{option} is '{value}'; give an amount in {unit} above 0, for example {example}")
    prefix = match[2] or ""
    return float(match[1]) * PREFIXES["k" if prefix == "K" else prefix]
