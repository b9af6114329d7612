"""What ranks send each other: recorded rank by rank, compared between the members of each group, and replayed."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

NAMESPACES = {"c10d", "_c10d_functional", "_dtensor"}
# These wait for messages, or prepare them, and send none.
SILENT = {"wait_tensor", "_wrap_tensor_autograd"}


class Message(NamedTuple):
    """One call of a rank, with the ranks of the group, and the line of the project that made it."""

    operation: str
    group: str
    ranks: tuple[int, ...]
    tensors: tuple[Any, ...]  # Shape, type and kind of device of each; and numbers and words, such as the root.
    peer: int | None  # The other rank of a send or a receive.
    line: str

    def describe(self) -> str:
        return f"{self.operation} in a group of {len(self.ranks)} at {self.line}"


def is_message(func: Any) -> bool:
    """Return whether an operation of PyTorch sends something."""
    return func.namespace in NAMESPACES and func._opname not in SILENT


def message_of(func: Any, args: Any, line: str) -> Message:
    """Return what an operation of PyTorch sends."""
    leaves = tree_leaves(args)
    group = group_of(leaves)
    ranks = dist.get_process_group_ranks(group)
    is_pair = func._opname in ("send", "recv_")
    contents: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            contents.append((tuple(leaf.shape), leaf.dtype, leaf.device.type))
        elif isinstance(leaf, int | str) and not is_pair:
            contents.append(leaf)
    peer = ranks[args[2]] if is_pair else None
    return Message(func._opname, group.group_name, tuple(ranks), tuple(contents), peer, line)


def group_of(leaves: list[Any]) -> Any:
    """Return the process group among the arguments of an operation: an object, or its name."""
    for leaf in leaves:
        if isinstance(leaf, str) and leaf in dist.distributed_c10d._world.pg_names.values():
            return dist.distributed_c10d._resolve_process_group(leaf)
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return dist.ProcessGroup.unbox(leaf)
    raise TypeError("a message without a group")


def differences(messages: dict[int, list[Message]]) -> list[str]:
    """Return where members of a group do not call the same, and the sends that no receive meets, as sentences."""
    found = []
    calls: dict[tuple[str, tuple[int, ...]], dict[int, list[Message]]] = defaultdict(lambda: defaultdict(list))
    pairs: dict[tuple[int, int], tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
    for rank, sequence in messages.items():
        for message in sequence:
            if message.peer is None:
                calls[message.group, message.ranks][rank].append(message)
            elif message.operation.startswith("send"):
                pairs[rank, message.peer][0].append(message.tensors)
            else:
                pairs[message.peer, rank][1].append(message.tensors)
    for (_, ranks), sequences in calls.items():
        for rank in ranks[1:]:
            found += compare(ranks[0], sequences[ranks[0]], rank, sequences[rank])
    for (source, target), (sent, received) in pairs.items():
        if sent != received:
            found.append(f"rank {source} sends to rank {target} {sent}, which receives {received}")
    return found


def compare(first: int, expected: list[Message], rank: int, sequence: list[Message]) -> list[str]:
    """Return the first call in which two members of a group differ."""
    for number in range(max(len(expected), len(sequence))):
        pair = [calls[number] if number < len(calls) else None for calls in (expected, sequence)]
        ours, theirs = (message and message[:4] for message in pair)
        if ours != theirs:
            texts = [message.describe() if message else "nothing" for message in pair]
            return [f"call {number} of a group: rank {first} {texts[0]}, rank {rank} {texts[1]}"]
    return []


def replay(messages: dict[int, list[Message]]) -> list[str]:
    """Advance each rank until it has to wait, and stop when none moves; returns where ranks wait for ever.

    A collective ends when all members have come to it; a receive waits for its message, and a send for nothing.
    """
    done = dict.fromkeys(messages, 0)
    taken: dict[tuple[int, str], int] = defaultdict(int)  # Collectives of a rank in a group.
    arrived: dict[tuple[str, tuple[int, ...], int], set[int]] = defaultdict(set)
    in_flight: dict[tuple[int, int], int] = defaultdict(int)
    moves = True
    while moves:
        moves = False
        for rank, sequence in messages.items():
            while done[rank] < len(sequence):
                message = sequence[done[rank]]
                if message.peer is None:
                    call = (message.group, message.ranks, taken[rank, message.group])
                    arrived[call].add(rank)
                    if arrived[call] != {*message.ranks}:
                        break
                    taken[rank, message.group] += 1
                elif message.operation.startswith("send"):
                    in_flight[rank, message.peer] += 1
                else:
                    if not in_flight[message.peer, rank]:
                        break
                    in_flight[message.peer, rank] -= 1
                done[rank] += 1
                moves = True
    stuck = [rank for rank, sequence in messages.items() if done[rank] < len(sequence)]
    return [f"rank {rank} waits in {messages[rank][done[rank]].describe()}" for rank in stuck]
