"""Which ranks do the same in a step, so that one simulation stands for all of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch._subclasses.fake_tensor import DataDependentOutputException

from ..config import UserError
from .messages import spans
from .simulate import Figures, Project, Whole, describe, read_batch, simulate


@dataclass(frozen=True)
class Role:
    """Ranks that do the same, in ascending order, and the figures of the first one."""

    ranks: list[int]
    figures: Figures


def simulate_all(project: Project) -> tuple[Whole, list[Role]]:
    """Simulate a step of each kind of rank, in the order of their first ranks; rejects a model that reads values."""
    batch = read_batch(project)
    try:
        whole = describe(project, batch)
        return whole, [Role(ranks, simulate(project, batch, whole, ranks[0])) for ranks in find_alike(project, whole)]
    except DataDependentOutputException as error:
        raise UserError(f"plan computes without values, but the model or its loss reads one ({error.func})") from error


def find_alike(project: Project, whole: Whole) -> list[list[int]]:
    """Return the ranks in groups of those that do the same."""
    alike: dict[Any, list[int]] = {}
    for rank in range(project.options.ranks):
        role = project.layout.role(rank, whole.lengths)
        alike.setdefault((role, *link_kinds(project, rank)), []).append(rank)
    return list(alike.values())


def link_kinds(project: Project, rank: int) -> Iterator[bool]:
    """Yield for each dimension of the mesh whether the ranks that differ from ``rank`` in it are on several nodes."""
    rows, columns = project.layout.mesh_shape()
    row, column = divmod(rank, columns)
    # Nodes are numbered as ranks are, so the first and the last rank suffice.
    yield spans((column, (rows - 1) * columns + column), project.options.ranks_per_node())
    yield spans((row * columns, (row + 1) * columns - 1), project.options.ranks_per_node())


def device_peak(project: Project, role: Role) -> int:
    """Return the bytes that a rank needs of its device at the peak."""
    on_host = project.layout.host_kinds()
    return sum(size for kind, size in role.figures.memory.items() if kind not in on_host)


def largest(project: Project, roles: list[Role]) -> int:
    """Return the bytes that the rank with the most needs of its device."""
    return max(device_peak(project, role) for role in roles)
