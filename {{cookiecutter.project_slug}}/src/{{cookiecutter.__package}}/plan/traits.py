"""What a simulation has to know of a strategy, for one that replicates the model; ``layout.py`` has what differs."""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..launch import PlanOptions
from .messages import Message


class Traits:
    """What distinguishes ranks, and where their memory is, under some settings on some machines.

    Attributes:
        thrifty: Settings of the strategy that take less memory, with their values; the first ones cost least.
        other_strategy: The one to change to if no settings fit.
        note: What the figures leave out.
    """

    thrifty: tuple[tuple[str, Any], ...] = ()
    other_strategy: str
    note = ""

    def __init__(self, layout: Any, options: PlanOptions) -> None:
        self.layout, self.options = layout, options

    def mesh_shape(self) -> tuple[int, int]:
        """Return the shape of the mesh of all ranks."""
        return 1, self.options.ranks

    def role(self, rank: int, lengths: Collection[int]) -> Any:
        """Return what distinguishes a rank from others; ``lengths`` are the first dimensions of parameters."""
        return 0

    def waiting(self, strategy: Any) -> float:
        """Return the share of a step in which ranks wait for each other by design."""
        return 0.0

    def blocks(self, message: Message) -> bool:
        """Return whether ranks wait for a message before they compute on."""
        return False

    def host_kinds(self) -> Collection[str]:
        """Return the kinds of memory that are the host's, not the device's."""
        return ()

    def rank_memory(self, device_memory: float) -> float:
        """Return the bytes that a rank has."""
        return device_memory

    def simulated(self) -> AbstractContextManager[None]:
        """Return a context in which the strategy runs without values."""
        return nullcontext()
