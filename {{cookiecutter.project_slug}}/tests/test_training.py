"""The settings of training act, and what a run keeps is what it should keep; all in this process, on one rank."""

import json
import math
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from support import RANKS, module, newest_checkpoint, read_checkpoint, read_records, settings

dataset, runtime, UserError = module("dataset"), module("runtime"), module("config").UserError
Trainer = module("train").Trainer


@pytest.fixture(scope="module")
def process() -> Iterator[Any]:
    """A process group of this process alone."""
    with runtime.process_group(settings("--distributed.device", "cpu").distributed, devices_per_rank=1) as alone:
        yield alone


@pytest.fixture
def build(process: Any, tmp_path: Path) -> Callable[..., Any]:
    """A function that builds a trainer from settings; it writes to ``tmp_path``."""
    return partial(build_trainer, process, tmp_path)


def build_trainer(process: Any, run: Path, *words: str) -> Any:
    """Build a trainer that writes to the directory ``run``."""
    return Trainer(settings("--distributed.device", "cpu", *words, "--run.dir", str(run)), process)


def step(trainer: Any) -> dict[str, torch.Tensor]:
    """Take one step, and return its losses."""
    losses: dict[str, torch.Tensor] = trainer.step(*module("splitting").unpack(next(iter(trainer.loader))))[0]
    return losses


def layers(trainer: Any) -> list[nn.Module]:
    """Return the modules that compute with matrices or kernels of their own."""
    modules = trainer.parallel.module.modules()
    return [layer for layer in modules if any(p.dim() > 1 for p in layer.parameters(recurse=False))]


def record_dtypes(trainer: Any) -> set[torch.dtype]:
    """Return a set that steps of the trainer fill with the dtypes of what its layers return."""
    seen = set[torch.dtype]()
    for layer in layers(trainer):
        if isinstance(layer, nn.Linear | nn.Conv2d):  # Other layers may return several outputs, or keep fp32.
            layer.register_forward_hook(lambda layer, inputs, output: seen.add(output.dtype))
    return seen


def draw() -> list[float]:
    """Draw a number from each of the global generators."""
    return [random.random(), np.random.rand(), torch.rand(1).item()]


def test_random_numbers_continue_where_they_were_saved(build: Callable[..., Any], tmp_path: Path) -> None:
    trainer = build()
    draw()
    trainer.checkpointer.save(trainer.progress)
    expected = draw()
    resumed = build()  # It seeds the generators: without what was saved, they would begin again.
    resumed.restore([newest_checkpoint(tmp_path)])
    assert draw() == expected


#:: if cookiecutter.parallelism == "tensor" ::#
def test_ranks_that_share_layers_draw_the_same_random_numbers(trained: Callable[..., Path]) -> None:
    different = 1
#:: else ::#
def test_ranks_draw_different_random_numbers(trained: Callable[..., Path]) -> None:
    different = RANKS
#:: endif ::#
    states = read_checkpoint(newest_checkpoint(trained(RANKS)))["rng"]
    for kind in ("python", "numpy", "torch"):
        found = {str(state[kind].tolist() if kind == "torch" else state[kind]) for state in states}
        assert len(found) == different, kind


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_layers_compute_in_the_precision_and_weights_stay_in_fp32(
    build: Callable[..., Any], precision: str, dtype: torch.dtype
) -> None:
    trainer = build("--train.precision", precision)
    seen = record_dtypes(trainer)
    step(trainer)
    assert dtype in seen or not seen
    assert {p.dtype for p in trainer.parallel.module.parameters()} == {torch.float32}


#:: if not cookiecutter.__one_process ::#
def test_blocks_are_compiled(build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # Traced, but not translated to C++.
    from torch._dynamo.utils import counters  # Slow to import.

    expected = float(step(build())["loss"])
    counters.clear()
    loss = float(step(build("--train.compile", "true"))["loss"])
    assert counters["stats"]["unique_graphs"] > 0
    assert loss == pytest.approx(expected, rel=1e-5)


def test_blocks_are_computed_again_for_backward(build: Callable[..., Any]) -> None:
    calls: dict[str, int] = {}
    for value in ("false", "true"):
        trainer = build("--train.activation_checkpointing", value)
        for layer in layers(trainer):
            layer.register_forward_pre_hook(lambda *_: calls.update({value: calls.get(value, 0) + 1}))  # noqa: B023
        step(trainer)
    assert calls["false"] < calls["true"] <= 2 * calls["false"]


#:: endif ::#
def test_evaluation_is_in_evaluation_mode_and_training_is_not(build: Callable[..., Any]) -> None:
    trainer, modes = build(), []
    for layer in layers(trainer):
        layer.register_forward_pre_hook(lambda layer, _: modes.append(layer.training))
    trainer.evaluator()
    assert set(modes) == {False}
    batch = module("splitting").unpack(next(iter(trainer.loader)))
    modes.clear()
    trainer.step(*batch)
    assert set(modes) == {True}


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_gradient_that_is_not_finite_never_reaches_the_weights(build: Callable[..., Any], policy: str) -> None:
    trainer = build("--train.on_nonfinite", policy)
    step(trainer)
    before, add_loss = weights_and_moments(trainer), trainer.parallel.add_loss
    trainer.parallel.add_loss = lambda *arguments: add_loss(*arguments) * math.nan
    step(trainer)
    trainer.parallel.add_loss = add_loss
    after = weights_and_moments(trainer)
    assert all(torch.equal(after[name], before[name]) for name in before)
    step(trainer)  # A run that stops takes no further step; one that skips does.
    after = weights_and_moments(trainer)
    assert any(not torch.equal(after[name], before[name]) for name in before) == (policy == "skip")


def weights_and_moments(trainer: Any) -> dict[str, torch.Tensor]:
    """Return copies of what this rank holds of the weights and of the optimizer's state."""
    tensors = trainer.checkpointer.replicable_state()
    return {name: getattr(tensor, "_local_tensor", tensor).clone() for name, tensor in tensors.items()}


@dataclass
class Finished:
    """A run, what its evaluations gave in each step, and how long its ranks would have waited for each other."""

    run: Path
    values: list[float]
    timeout: timedelta


@pytest.fixture(scope="module")
def finished(process: Any, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run of eight steps that evaluates and saves after each of them; the second evaluation is the best."""
    run, sign = tmp_path_factory.mktemp("finished"), 1 if dataset.HIGHER_IS_BETTER else -1
    every_step = "--train.eval_every 1 --checkpoint.every_steps 1 --train.log_every 3 --checkpoint.keep 3".split()
    timeout = ["--distributed.timeout_seconds", "77"]
    trainer = build_trainer(process, run, "--train.max_steps", "8", *every_step, *timeout)
    values = [sign * value for value in (0.1, 0.9, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)]
    #:: if cookiecutter.__plays ::#
    records = iter([{"num_samples": 1, dataset.BEST_METRIC: value, "environment_steps": 64} for value in values])
    #:: else ::#
    records = iter([{"num_samples": 1, dataset.BEST_METRIC: value} for value in values])
    #:: endif ::#
    trainer.evaluator = lambda: next(records)
    trainer.run()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    return Finished(run, values, backend.options._timeout)


def test_a_run_keeps_the_newest_checkpoints_and_the_best(finished: Finished) -> None:
    evaluations = read_records(finished.run, "eval")
    assert [record[dataset.BEST_METRIC] for record in evaluations] == finished.values
    progress = read_checkpoint(newest_checkpoint(finished.run))["progress"]
    assert (progress["best_step"], progress["best_value"]) == (2, finished.values[1])
    kept = {int(path.stem.removeprefix("step-")) for path in (finished.run / "checkpoints").iterdir()}
    assert kept == {2, 6, 7, 8}


def test_a_run_logs_every_few_steps_and_the_last_one(finished: Finished) -> None:
    records = read_records(finished.run, "train")
    assert [record["step"] for record in records] == [3, 6, 8]
    assert all(math.isfinite(record["loss"]) for record in records)


def test_the_curves_show_what_was_logged(finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes  # Slow to import.

    drawn: dict[str, list[tuple[int, float]]] = {}
    plot = Axes.plot

    def spy(axes: Axes, steps: Any, values: Any, label: str, **options: Any) -> Any:
        drawn[label] = list(zip(steps, values, strict=True))
        return plot(axes, steps, values, label=label, **options)

    monkeypatch.setattr(Axes, "plot", spy)
    figure = module("reporting.curves").draw_curves(finished.run, dataset.BEST_METRIC, {"loss": "nats"})
    figure.savefig(tmp_path / "a.png")
    assert (figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()) == ("optimizer step", "loss (nats)")
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes)
    records = read_records(finished.run, "train")
    #:: if cookiecutter.__plays ::#
    assert drawn["training loss"] == [(record["step"], record["loss"]) for record in records]
    played = read_records(finished.run, "eval")
    assert drawn["test mean return"] == [(record["environment_steps"], record["mean_return"]) for record in played]
    #:: else ::#
    assert drawn["training loss"] == [(record["step"], record["loss"]) for record in records]
    assert drawn[f"test {dataset.BEST_METRIC.replace('_', ' ')}"] == list(enumerate(finished.values, start=1))
    #:: endif ::#
    assert (tmp_path / "a.png").stat().st_size > 0


def test_the_curves_show_both_splits_and_where_the_run_was_resumed(tmp_path: Path) -> None:
    rows = [{"event": event, "step": step, "loss": 1.0} for step in (10, 20, 30) for event in ("train", "eval")]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Newest first: the start that resumed from 25 went back behind the one from 28, and the one from 30 took no step.
    steps = [30, 25, 28, 12, 0, None, "5"]
    starts = [{"step": step} for step in steps]
    (tmp_path / "provenance.json").write_text(json.dumps(starts[0] | {"earlier": starts[1:]}))
    axes = module("reporting.curves").draw_curves(tmp_path, dataset.BEST_METRIC, {}).axes[0]
    assert [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "--"] == [12, 25]
    shown = [text.get_text() for text in axes.get_legend().get_texts()]
    assert shown == ["training loss", "test loss", "resumed"]


def test_a_picture_that_cannot_be_made_is_only_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    collect, write = module("reporting").collect_examples, module("reporting").write_examples
    write(tmp_path, {"a.png": fail, "b.txt": lambda: "text", **collect(SimpleNamespace(examples=len), None)})
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 2 and printed[0].startswith(f"warning: no a.png in {tmp_path}: ")
    assert "No space left" in printed[0] and "no examples" in printed[1] and "TypeError" in printed[1]
    assert [path.name for path in tmp_path.iterdir()] == ["b.txt"]


def test_throughput_counts_the_time_of_training_alone(
    build: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "--train.max_steps 6 --train.log_every 2 --train.eval_every 1 --checkpoint.every_steps 5"
    trainer, now = build(*words.split()), 0.0

    def taking(seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any) -> Any:
            nonlocal now
            now += seconds
            return function(*arguments)

        return act

    monkeypatch.setattr(module("reporting.pace"), "time", SimpleNamespace(perf_counter=lambda: now))
    trainer.step = taking(0.5, trainer.step)
    # All are as good as the first, which alone is saved as the best.
    trainer.evaluator = taking(100, lambda: {"num_samples": 1, dataset.BEST_METRIC: 1.0})
    trainer.checkpointer.save = taking(10, trainer.checkpointer.save)
    trainer.run()
    rates = [record["samples_per_second"] for record in read_records(tmp_path, "train")]
    assert rates == 3 * [2 * trainer.config.data.global_batch_size]


def test_ranks_wait_for_each_other_as_long_as_the_setting_says(finished: Finished) -> None:
    assert finished.timeout == timedelta(seconds=77)


def test_a_save_that_fails_leaves_no_checkpoint(
    build: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished = []

    def fail(file: int) -> None:
        unfinished.extend(tmp_path.glob("checkpoints/*.pt"))  # What a kill would leave.
        raise OSError("no space left on device")

    trainer = build()
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match="no space left"):
        trainer.checkpointer.save(trainer.progress)
    assert not unfinished and not list(tmp_path.glob("checkpoints/*"))
