"""The table that ``benchmark`` prints, for a reader; everything in it is in the record."""

from collections.abc import Iterator
from typing import Any


def format_table(record: dict[str, Any], records: list[dict[str, Any]]) -> str:
    """Return the measurements of a record, one per line, and how throughput grows over the world sizes of all."""
    parts = step_rows(record), rate_rows(record), collective_rows(record), save_rows(record), scaling_rows(records)
    rows = [row for part in parts for row in part]
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(name.ljust(width) + text for name, text in rows)


def mean_parts(record: dict[str, Any]) -> dict[str, float]:
    """Return the milliseconds of each part of a step, the mean over the ranks."""
    ranks = [rank["parts_ms"] for rank in record["ranks"]]
    return {name: sum(rank[name] for rank in ranks) / len(ranks) for name in ranks[0]}


def format_rate(rate: float) -> str:
    """Return a number of samples, with three digits if it is small."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def step_rows(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the parts of a step."""
    parts = mean_parts(record)
    whole = sum(parts.values())
    yield f"a step, {record['world_size']} rank(s), {record['device']}", "mean over the ranks"
    for name, milliseconds in parts.items():
        yield f"  {name.replace('_', ' ')}", f"{milliseconds:9.2f} ms  {milliseconds / whole:4.0%}"
    yield "  sum", f"{whole:9.2f} ms"


def rate_rows(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield throughput, FLOPs, memory, and how long the start took."""
    tokens = f", {record['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in record else ""
    yield "throughput", f"{format_rate(record['samples_per_second'])} samples/s{tokens}"
    if record["flops_per_step"] is None:
        yield "model FLOPs", "not known: the model reads values, or uses an operation that has no shapes alone"
    else:
        peak = f"the peak of this {record['device']} is not known"
        share = peak if record["mfu"] is None else f"{record['mfu']:.1%} of the devices' peak"
        billions = record["flops_per_step"] / 1e9, record["flops_per_second"] / 1e9
        yield "model FLOPs", f"{billions[0]:,.2f} x 10^9 per step, {billions[1]:,.1f} x 10^9 per second; {share}"
    #:: if cookiecutter.__has_stages ::#
    yield "bubble", f"{record['bubble_measured']:.1%} measured, {record['bubble_expected']:.1%} expected"
    #:: endif ::#
    peaks = [rank["peak_memory_mib"] for rank in record["ranks"]]
    yield "peak memory", f"{max(peaks):,.1f} MiB on the rank with the most, {min(peaks):,.1f} on that with the least"
    yield "first step", f"done {record['first_step_seconds']:.1f} s after the start"


def collective_rows(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield how long it takes to average tensors over the ranks."""
    if record["collectives"]:
        link = f"in brackets: what it takes at {record['link_gb_per_second']:.2f} GB/s, which the slowest link reached"
        yield "average over the ranks", link
    for each in record["collectives"]:
        ring = f"all-reduce {each['all_reduce_ms']:8.2f} ms ({each['ring_bound_ms']:.2f})"
        server = f"parameter server {each['server_ms']:8.2f} ms ({each['server_bound_ms']:.2f})"
        yield f"  {each['bytes'] // 1024:,} KiB", f"{ring}   {server}"


def save_rows(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield how long a save takes."""
    for kind, save in record["saves"].items():
        stall = f"training stands still for {1000 * save['stall_seconds']:,.1f} ms"
        yield f"{kind} checkpoint", f"{save['mib']:,.1f} MiB, complete after {1000 * save['seconds']:,.1f} ms; {stall}"


def scaling_rows(records: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield how throughput grows over the world sizes that were measured, if they are several."""
    if len(records) > 1:
        yield "scaling", f"of the same global batch, relative to {records[0]['world_size']} rank(s)"
        for each in records:
            rate = format_rate(each["samples_per_second"])
            yield f"  {each['world_size']} rank(s)", f"{rate:>12} samples/s  {each['scaling_efficiency']:4.0%} per rank"
