"""Which settings fit if the given ones do not: changes that save memory, one after the other, each simulated."""

from collections.abc import Callable, Iterator
from typing import Any

from ..config import UserError
from .roles import Role, largest, simulate_all
from .simulate import Project

Change = tuple[str, str, Any]  # Section, setting, value.


def changes(project: Project) -> Iterator[Change]:
    """Yield changes that may need less memory; the first ones cost least, and none of them changes the global batch."""
    config = project.config
    share, microbatches = config.data.global_batch_size // config.parallel.dp_size(project.options.ranks), 1
    while microbatches < share:
        microbatches = min(2 * microbatches, share)
        if microbatches > config.train.microbatches:
            yield "train", "microbatches", microbatches
    yield from (("parallel", setting, value) for setting, value in project.layout.thrifty)
    yield "train", "activation_checkpointing", True
    yield "train", "precision", "bf16"


def find_remedy(
    project: Project, roles: list[Role], check: Callable[[Any, int], None]
) -> tuple[list[Change], list[Role]]:
    """Return changes with which the ranks need least memory, the fewest with which it fits, and the roles then.

    Args:
        project: One that does not fit.
        roles: Its roles.
        check: Rejects settings that cannot work on a number of ranks.
    """
    kept: dict[tuple[str, str], Any] = {}
    for section, setting, value in changes(project):
        if getattr(getattr(project.config, section), setting) == value:
            continue
        changed = project.change(section, **{setting: value})
        try:
            check(changed.config, project.options.ranks)
            _, changed_roles = simulate_all(changed)
        except UserError:
            continue  # These settings do not go together.
        if largest(changed, changed_roles) < largest(project, roles):
            project, roles = changed, changed_roles
            kept[section, setting] = value
        if fits(project, roles):
            break
    return [(*names, value) for names, value in kept.items()], roles


def fits(project: Project, roles: list[Role]) -> bool:
    """Return whether every rank has enough memory; True if it is not known how much it has."""
    memory = project.options.device_memory
    return memory is None or largest(project, roles) <= project.layout.rank_memory(memory)
