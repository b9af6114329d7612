"""The order of the measurements, and what becomes of them. In the run directory, next to what a run leaves there:

benchmark.json         one record per world size
benchmark.png          all of them in one picture
trace-rank*.json       with ``--profile``: what each rank did in a few steps, for https://ui.perfetto.dev
snapshot-rank*.pickle  with ``--profile``, on CUDA: its memory meanwhile, for https://pytorch.org/memory_viz
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..launch import lock
from ..reporting import describe_run, memory_in_use, reset_peak_memory, write_examples
from ..runtime import Process, all_gather_object, on_main
#:: if cookiecutter.__has_stages ::#
from .bubble import expected_bubble, measured_bubble, watch_stages
#:: endif ::#
from .collectives import measure_collectives
from .flops import rate_flops
from .picture import draw_benchmark
from .records import add_record
from .saving import measure_saves
from .steps import Steps, Stopwatch, take_out, watch_parts
from .table import format_table
from .trace import Kept, measure_exposed

WARM_UP, STEPS = 5, 20


def benchmark(
    build_trainer: Callable[[], Any],
    build_model: Callable[[], nn.Module],
    process: Process,
    run_dir: Path,
    started: float,
    profile: bool,
) -> None:
    """Train a few steps to measure them, and report the result; a collective. A run in ``run_dir`` stays as it is.

    Rejects a directory that is in use.

    Args:
        build_trainer: Builds what is measured.
        build_model: Builds the whole model, on the device of a ``with`` block.
        process: This rank.
        run_dir: Created if missing.
        started: When this process started, by ``time.perf_counter``.
        profile: Whether to keep traces.
    """
    on_main(lambda: reserve(run_dir))
    kept = Kept(run_dir, process) if profile else None
    before = memory_in_use(process.device)
    trainer = build_trainer()
    reset_peak_memory(process.device)
    steps = Steps(trainer)
    record, own = measure_steps(steps, process, started, before, kept)
    ranks: list[Any] = all_gather_object(own)
    #:: if cookiecutter.__has_stages ::#
    record["bubble_expected"] = round(expected_bubble(trainer.parallel), 4)
    record["bubble_measured"] = round(measured_bubble([rank["ms_per_step"] for rank in ranks]), 4)
    #:: endif ::#
    record |= rate_flops(build_model, steps, record["samples_per_second"])
    # gloo exchanges most kinds of messages only between CPUs.
    on_cpu = trainer.config.distributed.backend == "gloo"
    record |= measure_collectives(torch.device("cpu") if on_cpu else process.device)
    record["saves"] = measure_saves(trainer, run_dir / "benchmark.tmp", process)
    record["ranks"] = ranks
    on_main(lambda: report(record, run_dir, asdict(trainer.config), process))


def reserve(run_dir: Path) -> None:
    """Create and lock the run directory: nothing should train in it meanwhile, nor measure."""
    run_dir.mkdir(parents=True, exist_ok=True)
    lock(run_dir)


def measure_steps(
    steps: Steps, process: Process, started: float, before: int, kept: Kept | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the record of all ranks, and what this rank measured of its steps; it used ``before`` bytes before them.

    Throughput is measured first, without timing the parts of a step, because that has to wait for the device.
    """
    trainer, stopwatch = steps.trainer, Stopwatch(process.device)
    count = trainer.config.train.max_steps or STEPS
    steps.take(1)
    first_step = stopwatch.now() - started
    steps.take(WARM_UP - 1)
    #:: if cookiecutter.__plays ::#
    environment_steps = -trainer.sampler.environment_steps
    #:: endif ::#
    seconds = stopwatch.time(lambda: steps.take(count))
    #:: if cookiecutter.__plays ::#
    environment_steps += trainer.sampler.environment_steps
    #:: endif ::#

    with stopwatch:
        watch_parts(stopwatch, steps, trainer)
        #:: if cookiecutter.__has_stages ::#
        watch_stages(trainer.parallel, stopwatch)
        #:: endif ::#
        stopwatch.seconds["whole_step"] = stopwatch.time(lambda: steps.take(count))
        times = {name: 1000 * total / count for name, total in stopwatch.seconds.items()}
        peak = memory_in_use(process.device, peak=True) - before  # A trace takes memory, too.
        exposed = measure_exposed(steps, process.device, kept)
    parts = take_out(exposed, times)
    record = {
        "event": "benchmark",
        "world_size": process.world_size,
        "device": process.device.type,
        **trainer.pace.throughput(count, seconds),
        #:: if cookiecutter.__plays ::#
        "environment_steps_per_second": round(environment_steps / seconds, 1),
        "collecting_share": round(times.get("collecting", 0.0) / times["whole_step"], 4),
        "stepping_share": round(times.get("stepping", 0.0) / times["whole_step"], 4),
        #:: endif ::#
        "first_step_seconds": round(max(all_gather_object(first_step)), 2),
    }
    own = {"ms_per_step": round_all(times), "parts_ms": round_all(parts), "peak_memory_mib": round(peak / 2**20, 1)}
    return record, own


def round_all(times: dict[str, float]) -> dict[str, float]:
    """Return milliseconds with three digits."""
    return {name: round(time, 3) for name, time in times.items()}


def report(record: dict[str, Any], run_dir: Path, settings: dict[str, Any], process: Process) -> None:
    """Add the record to those in the run directory, draw them, and print a table; stdout gets the record as JSON."""
    records = add_record(run_dir / "benchmark.json", record, settings, describe_run(process))
    write_examples(run_dir, {"benchmark.png": lambda: draw_benchmark(records)})
    print(format_table(record, records), file=sys.stderr)
    print(json.dumps(record))
