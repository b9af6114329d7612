"""``benchmark.png``: the records of all world sizes in one picture."""

from typing import Any

from ..reporting import new_figure
from .table import mean_parts


def draw_benchmark(records: list[dict[str, Any]]) -> Any:
    """Return a figure of a step's parts, of averaging over the ranks, of throughput and of saving."""
    figure = new_figure(15, 9)
    (step, averages), (scaling, saves) = figure.subplots(2, 2)
    draw_step(step, records)
    draw_averages(averages, records)
    draw_scaling(scaling, records)
    draw_saves(saves, records[-1])
    return figure


def draw_step(axes: Any, records: list[dict[str, Any]]) -> None:
    """Draw a bar for each world size, divided into the parts of a step."""
    names = [str(record["world_size"]) for record in records]
    all_parts = [mean_parts(record) for record in records]
    left = [0.0] * len(records)
    for part in all_parts[0]:
        widths = [parts[part] for parts in all_parts]
        hatch = "//" if part == "exposed_communication" else ""
        axes.barh(names, widths, left=left, label=part.replace("_", " "), hatch=hatch)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set(xlabel="ms per step, mean over the ranks", ylabel="ranks", title="where the time of a step goes")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3)


def draw_averages(axes: Any, records: list[dict[str, Any]]) -> None:
    """Draw how long it takes to average a tensor over the ranks, by its size."""
    colors = iter(f"C{number}" for number in range(10))
    for record in records:
        if points := record["collectives"]:
            color, world_size = next(colors), record["world_size"]
            sizes = [point["bytes"] for point in points]
            for key, style, label in (
                ("all_reduce_ms", "o-", "all-reduce"),
                ("ring_bound_ms", ":", "bound of a ring"),
                ("server_ms", "s--", "parameter server"),
            ):
                times = [point[key] for point in points]
                axes.plot(sizes, times, style, color=color, label=f"{label}, {world_size} ranks")
    axes.set(xlabel="size of the tensor (bytes)", ylabel="ms", title="averaging over the ranks")
    if axes.lines:
        axes.set(xscale="log", yscale="log")
        axes.legend()
    axes.grid(alpha=0.3)


def draw_scaling(axes: Any, records: list[dict[str, Any]]) -> None:
    """Draw the throughput over the world size, and what it would be if every rank added the same."""
    sizes = [record["world_size"] for record in records]
    rates = [record["samples_per_second"] for record in records]
    axes.plot(sizes, rates, "o-", label="measured")
    axes.plot(sizes, [rates[0] / sizes[0] * size for size in sizes], ":", label="the same from every rank")
    for record, size, rate in zip(records, sizes, rates, strict=True):
        axes.annotate(f"{record['scaling_efficiency']:.0%}", (size, rate), textcoords="offset points", xytext=(4, -12))
    axes.set(xlabel="ranks", ylabel="samples per second", title="scaling, with the same global batch", xticks=sizes)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()


def draw_saves(axes: Any, record: dict[str, Any]) -> None:
    """Draw how long a save takes in both formats, and how long training stands still."""
    kinds = list(record["saves"])
    bars = {"seconds": ("until it is complete", 0.8), "stall_seconds": ("training stands still", 0.4)}
    for key, (label, width) in bars.items():
        axes.barh(kinds, [1000 * record["saves"][kind][key] for kind in kinds], width, label=label)
    axes.set(xlabel="ms", ylabel="checkpoint", title=f"a save, {record['world_size']} rank(s)")
    axes.legend()
